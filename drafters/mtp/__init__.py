"""A target's own module for further tokens."""
