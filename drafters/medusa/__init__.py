"""The Medusa kind."""
