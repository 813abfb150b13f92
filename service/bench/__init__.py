"""Benchmarks of a configuration, and the check that speculation is lossless, on the same assembly that serves."""
