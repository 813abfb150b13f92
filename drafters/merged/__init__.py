"""Several drafters, one tree."""
