"""`kernels.settle` on a device: the walk and the commit are kernels."""

from functools import partial

from kernels.settle import settle_with
from kernels.triton.accept import accept
from kernels.triton.commit_slots import commit_slots

settle = partial(settle_with, accept, commit_slots)
