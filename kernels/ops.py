"""The one place where each op is bound to an implementation, once, at import: the step never compares backend names."""

from kernels.accept import accept
from kernels.gumbel import gumbel_noise, gumbel_noise_of
from kernels.tree_attention import plan_attention, tree_attention

__all__ = ["accept", "gumbel_noise", "gumbel_noise_of", "plan_attention", "tree_attention"]
