"""What all kinds of trained drafters share: layers, blocks, growing trees, recording, files."""
