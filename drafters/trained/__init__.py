"""The kinds of trained drafters, each in a module of its own."""
