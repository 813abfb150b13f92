"""Past answers beyond the engine: in a file over restarts, and shared by replicas."""
