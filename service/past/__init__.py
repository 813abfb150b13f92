"""Persistence of past answers in a file, and their exchange between replicas."""
