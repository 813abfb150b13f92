"""The one place where ops are bound to implementations: Triton kernels on CUDA devices, plain torch everywhere else.

Whoever is built for a device asks for its table once; nobody compares backend names in a step. Ops that are not in the
table (noise for a drafter's candidates) are plain torch on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from kernels import (
    accept,
    commit_slots,
    draft_loss,
    linear,
    rank_features,
    rms_norm,
    rotary,
    sample,
    sample_filtered,
    silu_mul,
    store_kv,
    tree_attention,
)
from kernels.accept import Accepted
from kernels.commit_slots import CommittedSlots
from kernels.draft_loss import HeadLoss
from kernels.gumbel import gumbel_noise, gumbel_noise_of
from kernels.linear import Product
from kernels.sample import Choice
from kernels.sample_filtered import Filters
from kernels.tree_attention import Attention, AttentionRows

__all__ = ["REFERENCE", "Ops", "gumbel_noise", "gumbel_noise_of", "on"]


class PlanAttention(Protocol):
    """`kernels.tree_attention.plan_attention`."""

    def __call__(
        self,
        rows: AttentionRows,
        slot_table: Tensor,
        *,
        num_slots: int,
        query_heads: int,
        kv_heads: int,
        member_multiple: int,
        padding: int = 0,
    ) -> Attention: ...


class DraftObjective(Protocol):
    """`kernels.draft_loss.draft_objective`."""

    def __call__(
        self, states: Tensor, anchor_head: Tensor, drafted: Tensor, top_logprobs: Tensor, *, anchor_weight: float
    ) -> HeadLoss: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each op; what they do is said at the references."""

    plan_linear: Callable[[Tensor, Tensor | None], Product]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    plan_attention: PlanAttention
    sample: Callable[[Tensor, Tensor, Tensor, Tensor], Choice]
    sample_filtered: Callable[[Tensor, Tensor, Tensor, Tensor, Filters], Choice]
    accept: Callable[[Tensor, Tensor, Tensor, Tensor], Accepted]
    commit_slots: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], CommittedSlots]
    rank_features: Callable[[Tensor], tuple[Tensor, Tensor]]
    draft_objective: DraftObjective


REFERENCE = Ops(
    plan_linear=linear.plan_linear,
    rms_norm=rms_norm.rms_norm,
    rotary=rotary.rotary,
    silu_mul=silu_mul.silu_mul,
    store_kv=store_kv.store_kv,
    plan_attention=tree_attention.plan_attention,
    sample=sample.sample,
    sample_filtered=sample_filtered.sample_filtered,
    accept=accept.accept,
    commit_slots=commit_slots.commit_slots,
    rank_features=rank_features.rank_features,
    draft_objective=draft_loss.draft_objective,
)


def on(device: torch.device) -> Ops:
    """The ops for tensors on this device."""
    return _table(device.type)


@cache
def _table(device_type: str) -> Ops:
    return _device_table() if device_type == "cuda" else REFERENCE


def _device_table() -> Ops:
    """By name, from the twin of each reference's module: Triton is not installed where there is no device for it."""
    twins = {op: getattr(REFERENCE, op).__module__.replace("kernels.", "kernels.triton.") for op in Ops.__slots__}
    return Ops(**{op: getattr(import_module(module), op) for op, module in twins.items()})
