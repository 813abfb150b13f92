"""Experiments behind claims that were made once: run as `python -m benchmarks NAME`, not part of what is installed.

An experiment that operators ask for moves to `adaptree bench`.
"""
