"""Candidates pruned as in `kernels/pruning.py`, with survival corrected in one launch."""

from functools import partial

from kernels.pruning import prune_with
from kernels.triton.hit_rates import correct_survival

prune_trees = partial(prune_with, correct_survival)
