"""Prometheus metrics, the data of the live feed, and the screen of `adaptree top`."""
