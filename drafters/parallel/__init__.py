"""The ParallelSpec kind."""
