"""Drafters that are language models: another model, or the target's first layers."""
