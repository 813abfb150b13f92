"""The one place where ops are bound to implementations: Triton kernels on CUDA devices, compiled kernels on CPUs, and
plain torch where there is no kernel.

An object that computes on a device gets that device's table once; no step compares names of implementations. Ops that
are not in the table (noise for a drafter's candidates) are plain torch on every device.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from math import lcm
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.entries import add_entries, place_entries, record_tokens, take_entries
from kernels.experts import (
    Experts,
    QuantisedStack,
    StackedWeight,
    choose_experts,
    plan_experts,
    plan_shared_experts,
)
from kernels.joint_tree import add_text, grow_joint_tree, learn_committed
from kernels.lattice import grow_lattice, plan_growth, rank_features, spread_classes
from kernels.layers import (
    COLUMNS,
    EIGHT_BITS,
    Product,
    QuantisedWeight,
    Weight,
    add_rms_norm,
    gate_mul,
    in_8_bits,
    keep_blocks,
    plan_layers,
    plan_linear,
    rotary_store,
)
from kernels.pieces import Devices, Pieces, pieces_of, plan_shared
from kernels.recurrence import advance_states, gated_rms_norm
from kernels.rows import lay_out_rows
from kernels.sample import choose_likeliest, gumbel_noise_of, sample
from kernels.settle import settle
from kernels.survival import count_claims, judge_proposed, keep_proposed, prune_trees
from kernels.tree_attention import plan_attention
from kernels.trees import ancestor_matrix, fates, likeliest_nodes, merge_trees

__all__ = ["OPS", "REFERENCE", "Ops", "gumbel_noise_of", "implementation", "kernel_of", "kernel_set", "on"]


class Ops:
    """Table of ops: one implementation of each, which is the reference that defines the op, or a kernel with the same
    signature."""

    plan_linear = staticmethod(plan_linear)
    keep_blocks = staticmethod(keep_blocks)
    add_rms_norm = staticmethod(add_rms_norm)
    rotary_store = staticmethod(rotary_store)
    gate_mul = staticmethod(gate_mul)
    choose_experts = staticmethod(choose_experts)
    plan_experts = staticmethod(plan_experts)
    advance_states = staticmethod(advance_states)
    gated_rms_norm = staticmethod(gated_rms_norm)
    plan_layers = staticmethod(plan_layers)
    lay_out_rows = staticmethod(lay_out_rows)
    plan_attention = staticmethod(plan_attention)
    choose_likeliest = staticmethod(choose_likeliest)
    sample = staticmethod(sample)
    settle = staticmethod(settle)
    plan_growth = staticmethod(plan_growth)
    rank_features = staticmethod(rank_features)
    spread_classes = staticmethod(spread_classes)
    grow_lattice = staticmethod(grow_lattice)
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
    record_tokens = staticmethod(record_tokens)
    keep_proposed = staticmethod(keep_proposed)
    judge_proposed = staticmethod(judge_proposed)
    count_claims = staticmethod(count_claims)
    prune_trees = staticmethod(prune_trees)

    def __init__(self, **others: Callable[..., Any]) -> None:
        """`others`: kernels that replace the references of the same names."""
        vars(self).update(others)

    def plan_row_product(self, weight: Weight, bias: Tensor | None, unit: int) -> Product:
        """Plan a product over columns that several devices may share, `unit` of which stay on one.
        # weight [out, in], bias [out]"""
        return self.plan_linear(weight, bias, pieces_of(weight.shape[1], _unit(weight, unit)))

    def shared_by(self, devices: Devices) -> "Ops":
        """Return the same ops, except that `plan_row_product` multiplies by this device's columns of a weight, and
        `plan_experts` runs its experts; they add up the sums of all devices."""

        def plan(weight: Weight, bias: Tensor | None, unit: int) -> Product:
            return plan_shared(self.plan_linear, weight, bias, _unit(weight, unit), devices)

        plan_experts = partial(plan_shared_experts, self.plan_experts, of=devices)
        return Ops(**{**vars(self), "plan_row_product": plan, "plan_experts": plan_experts})

    def in_8_bits(self) -> "Ops":
        """Return the same ops, except that `plan_linear` and `plan_experts` quantise dense weights to 8 bits."""
        changed = {"plan_linear": self._plan_in_8_bits, "plan_experts": self._plan_experts_in_8_bits}
        return Ops(**{**vars(self), **changed})

    def _plan_in_8_bits(self, weight: Weight, bias: Tensor | None, pieces: Pieces | None = None) -> Product:
        return self.plan_linear(self._in_8_bits(weight) if isinstance(weight, Tensor) else weight, bias, pieces)

    def _plan_experts_in_8_bits(self, gate_up: StackedWeight, down: StackedWeight, *others: Any) -> Experts:
        return self.plan_experts(self._stack_in_8_bits(gate_up), self._stack_in_8_bits(down), *others)

    def _stack_in_8_bits(self, stack: StackedWeight) -> QuantisedStack:
        return QuantisedStack([*map(self._in_8_bits, stack)]) if isinstance(stack, Tensor) else stack

    def _in_8_bits(self, weight: Tensor) -> QuantisedWeight:
        pieces = map(in_8_bits, weight.detach().split(_ROWS))
        return self.keep_blocks(EIGHT_BITS, (weight.shape[0], weight.shape[1]), weight.dtype, pieces)


def _unit(weight: Weight, unit: int) -> int:
    """Number of columns that stay on one device, where `unit` columns do and the weight's blocks are not parted."""
    return lcm(unit, weight.unit if isinstance(weight, QuantisedWeight) else COLUMNS)


_ROWS = 4096  # rows of a weight that are held as float32 at a time while it is quantised

_MODULES = {
    "cpu": ("entries", "experts", "growth", "layers", "recurrence", "steps", "tree_attention", "trees"),
    "triton": (
        "experts",
        "joint_tree",
        "layers",
        "memory",
        "rank_features",
        "recurrence",
        "sample",
        "settle",
        "tree_attention",
        "trees",
    ),
}

REFERENCE = Ops()
OPS = tuple(name for name, op in vars(Ops).items() if isinstance(op, staticmethod))


def on(device: torch.device) -> Ops:
    """Return the ops for tensors on this device."""
    return _table(device.type)


def kernel_set(device: torch.device) -> str:
    """Name of the kernels that `on(device)` uses: "triton", a compiled build such as "avx2", or "torch"."""
    return "triton" if device.type == "cuda" else library.variant() or "torch"


@cache
def _table(device_type: str) -> Ops:
    if device_type == "cuda":
        return implementation("triton")
    return REFERENCE if library.variant() is None else implementation("cpu")


def implementation(kind: str) -> Ops:
    """Build the table of one kind of kernels, "triton" or "cpu"; an op without such a kernel is its reference."""
    return Ops(**{op: kernel for op in OPS if (kernel := kernel_of(op, kind)) is not None})


def kernel_of(op: str, kind: str) -> Callable[..., Any] | None:
    """Find the kernel of an op: the function of its name in a module of that kind. Returns None if there is none."""
    modules = (import_module(f"kernels.{kind}.{module}") for module in _MODULES[kind])
    return next((getattr(module, op) for module in modules if hasattr(module, op)), None)
