"""Prometheus metrics, the data of the live feed, and the guard that keeps failures of bookkeeping from requests."""
