"""Prometheus metrics, and the data of the live feed."""
