"""Drafters in the forms in which others publish them."""
