"""Drafters that are language models: another one, or the target's own first layers."""
