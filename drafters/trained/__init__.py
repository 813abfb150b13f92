"""The kinds of trained drafters: one module for each network, with its published forms."""
