"""Measurements and checks of the running configuration, on the same assembly that the server uses."""
