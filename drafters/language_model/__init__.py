"""Drafting with another language model that has the target's tokenizer."""
