"""The engine: one thread that owns target, slots and scheduler, and turns requests into tokens step by step."""
