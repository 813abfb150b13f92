"""The one place where ops are bound to implementations: Triton kernels on CUDA devices, kernels compiled for the
processor on CPUs, plain torch where there are none.

Whoever is built for a device asks for its table once; nobody compares backend names in a step. Ops that are not in the
table (noise for a drafter's candidates) are plain torch on every device.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.draft_loss import draft_objective
from kernels.entries import add_entries, place_entries, take_entries
from kernels.gumbel import gumbel_noise_of
from kernels.hit_rates import count_claims, count_hits, judge_proposed, keep_proposed
from kernels.lattice import grow_lattice, spread_classes
from kernels.layers import add_rms_norm, plan_layers, rotary_store, silu_mul
from kernels.linear import Product, Weight, plan_linear
from kernels.memory import add_text, grow_joint_tree, learn_committed
from kernels.pruning import prune_trees
from kernels.quantised import EIGHT_BITS, in_8_bits, keep_blocks
from kernels.rank_features import rank_features
from kernels.rows import lay_out_rows
from kernels.sample import choose_likeliest, sample
from kernels.settle import settle
from kernels.tree_attention import plan_attention
from kernels.trees import ancestor_matrix, fates, likeliest_nodes, merge_trees

__all__ = ["OPS", "REFERENCE", "Ops", "gumbel_noise_of", "kernel_set", "on", "twin"]


class Ops:
    """One implementation of each op: the reference, which also says what the op does, or another of its type."""

    plan_linear = staticmethod(plan_linear)
    keep_blocks = staticmethod(keep_blocks)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary_store = staticmethod(rotary_store)
    silu_mul = staticmethod(silu_mul)
    plan_layers = staticmethod(plan_layers)
    lay_out_rows = staticmethod(lay_out_rows)
    plan_attention = staticmethod(plan_attention)
    choose_likeliest = staticmethod(choose_likeliest)
    sample = staticmethod(sample)
    settle = staticmethod(settle)
    rank_features = staticmethod(rank_features)
    spread_classes = staticmethod(spread_classes)
    grow_lattice = staticmethod(grow_lattice)
    draft_objective = staticmethod(draft_objective)
    add_text = staticmethod(add_text)
    grow_joint_tree = staticmethod(grow_joint_tree)
    learn_committed = staticmethod(learn_committed)
    merge_trees = staticmethod(merge_trees)
    likeliest_nodes = staticmethod(likeliest_nodes)
    ancestor_matrix = staticmethod(ancestor_matrix)
    fates = staticmethod(fates)
    add_entries = staticmethod(add_entries)
    take_entries = staticmethod(take_entries)
    place_entries = staticmethod(place_entries)
    count_hits = staticmethod(count_hits)
    keep_proposed = staticmethod(keep_proposed)
    judge_proposed = staticmethod(judge_proposed)
    count_claims = staticmethod(count_claims)
    prune_trees = staticmethod(prune_trees)

    def __init__(self, **others: Callable[..., Any]) -> None:
        """`others` take the places of references."""
        vars(self).update(others)

    def in_8_bits(self) -> "Ops":
        """The same, whose linear layers keep 8 bits of their weights."""
        return Ops(**{**vars(self), "plan_linear": self._plan_in_8_bits})

    def _plan_in_8_bits(self, weight: Weight, bias: Tensor | None) -> Product:
        if isinstance(weight, Tensor):
            pieces = map(in_8_bits, weight.detach().split(_ROWS))
            weight = self.keep_blocks(EIGHT_BITS, (weight.shape[0], weight.shape[1]), weight.dtype, pieces)
        return self.plan_linear(weight, bias)


_ROWS = 4096  # of a matrix that are held as floats at once while it is quantised

REFERENCE = Ops()
OPS = tuple(name for name, op in vars(Ops).items() if isinstance(op, staticmethod))


def on(device: torch.device) -> Ops:
    """The ops for tensors on this device."""
    return _table(device.type)


def kernel_set(device: torch.device) -> str:
    """Which kernels `on` this device run, in a word: triton, a build for the processor, or torch."""
    return "triton" if device.type == "cuda" else library.variant() or "torch"


@cache
def _table(device_type: str) -> Ops:
    if device_type == "cuda":
        return _twins("triton")
    return REFERENCE if library.variant() is None else _twins("cpu")


def _twins(kind: str) -> Ops:
    return Ops(**{op: twin(op, kind) for op in OPS if has_twin(op, kind)})


def has_twin(op: str, kind: str) -> bool:
    """Whether there is a kernel of that kind."""
    home = _home(op, kind)
    return find_spec(home) is not None and hasattr(import_module(home), op)


def twin(op: str, kind: str) -> Callable[..., Any]:
    """The kernel, by name from the twin of its reference's module; Triton need not be installed before."""
    return getattr(import_module(_home(op, kind)), op)  # type: ignore[no-any-return]


def _home(op: str, kind: str) -> str:
    module: str = getattr(REFERENCE, op).__module__
    return module.replace("kernels.", f"kernels.{kind}.")
