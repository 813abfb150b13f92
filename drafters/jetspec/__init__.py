"""The JetSpec kind."""
