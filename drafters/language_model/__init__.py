"""Drafters that are language models: models with the target's tokenizer."""
