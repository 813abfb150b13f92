"""The one place where each op is bound to an implementation, once, at import: the step never compares backend names."""

from kernels.tree_attention import plan_attention, tree_attention

__all__ = ["plan_attention", "tree_attention"]
