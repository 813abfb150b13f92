"""Code that all kinds of trained drafters share: networks, forwards, growth of trees, recording, files."""
