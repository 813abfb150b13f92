"""Random trees around a known answer: the adversary of the exactness checks."""
