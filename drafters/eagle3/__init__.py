"""The EAGLE-3 kind."""
