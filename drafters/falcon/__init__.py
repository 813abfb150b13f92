"""The Falcon kind."""
