"""The engine: one thread that owns target, KV slots and scheduler, and generates tokens step by step."""
