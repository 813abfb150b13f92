"""The feed-forward of a mixture of experts: a router chooses a few experts for each row.

    y = sum_e w_e down_e(gate(gate_up_e x)), over the row's chosen experts e

The sum is added up in float32 and rounded once. Its pieces (`kernels.pieces`) are eighths of the experts; within a
piece experts are added in the order of their numbers, so that a row's bits do not depend on the other rows of a
forward, nor on the number of devices that share the experts.

Legend: rows = positions of one forward, experts = experts of a layer, chosen = experts of a row, in, out = widths of a
product, width = an expert's intermediate width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kernels.layers import GateForm, Product, QuantisedWeight, gate_mul, plan_linear
from kernels.pieces import Devices, Pieces, added, finished, pieces_of

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [rows, in], indices [rows, chosen] int64, weights [rows, chosen] float32 -> [rows, out], in the type of x, or in
float32 if they are a part of a layer's experts; then the numbers of others are negative or beyond theirs."""


class Router(NamedTuple):
    """How a layer chooses its experts."""

    chosen: int  # experts of a row
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"]  # how logits become weights
    normalised: bool  # weights of a row are divided by their sum
    scale: float = 1.0  # factor of all weights
    groups: int = 1  # equal groups of experts, of which the best `chosen_groups` are open to a row
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class QuantisedStack:
    """Quantised weights of all experts, in formats that are the same for each."""

    weights: Sequence[QuantisedWeight]  # [out, in] each

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sizes (experts, out, in)."""
        return len(self.weights), *self.weights[0].shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations."""
        return self.weights[0].dtype

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return sum(weight.num_bytes for weight in self.weights)

    def __getitem__(self, expert: int) -> QuantisedWeight:
        return self.weights[expert]

    def dense(self) -> Tensor:
        """Dequantise the weights. # -> [experts, out, in]"""
        return torch.stack([weight.dense() for weight in self.weights])


StackedWeight = Tensor | QuantisedStack
"""Weights of all experts, [experts, out, in]."""


def choose_experts(
    logits: Tensor, router: Router, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row, and their weights. Experts rank by logit, and with groups or a `correction` by
    score + correction; ties go to the lower number. Groups rank by the sum of their two best experts.
    # logits [rows, experts]; correction, expert_scale [experts] float32
    # -> indices [rows, chosen] int64, ascending; weights [rows, chosen] float32"""
    scores = ranks = logits.float()
    if router.scores != "softmax_of_chosen":
        scores = ranks.softmax(-1) if router.scores == "softmax" else ranks.sigmoid()
    if correction is not None or router.groups > 1:
        ranks = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = ranks.unflatten(-1, (router.groups, -1))  # [rows, groups, experts / groups]
        open_groups = _best(grouped.topk(2, dim=-1).values.sum(-1), router.chosen_groups)
        shut = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, open_groups, value=False)
        ranks = grouped.masked_fill(shut[..., None], float("-inf")).flatten(-2)
    indices = _best(ranks, router.chosen).sort(-1).values
    weights = scores.gather(-1, indices)
    if router.scores == "softmax_of_chosen":
        weights = weights.softmax(-1)
    if router.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * router.scale
    return indices, weights if expert_scale is None else weights * expert_scale[indices]


def _best(ranks: Tensor, count: int) -> Tensor:
    """Indices of the largest values, of equal ones the first. # [rows, n] -> [rows, count] int64"""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def plan_experts(
    gate_up: StackedWeight,
    down: StackedWeight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    gate: GateForm,
    pieces: Pieces | None = None,
) -> Experts:
    """Plan the feed-forward of all experts, or of a part of them. `pieces`: of the sum over these experts; None: those
    of all. # gate_up [experts, 2 * width, in], gate before up; down [experts, out, width]; gate_up_bias
    [experts, 2 * width]; down_bias [experts, out]"""
    planned = [*zip(_plans(gate_up, gate_up_bias), _plans(down, down_bias), strict=True)]
    return partial(_run, planned=planned, gate=gate, out=down.shape[1], pieces=pieces or pieces_of(len(planned), 1))


def _plans(stack: StackedWeight, bias: Tensor | None) -> list[Product]:
    return [plan_linear(stack[i], None if bias is None else bias[i]) for i in range(stack.shape[0])]


def _run(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    planned: Sequence[tuple[Product, Product]],
    gate: GateForm,
    out: int,
    pieces: Pieces,
) -> Tensor:
    """# x [rows, in]; indices, weights [rows, chosen] -> [rows, out]"""

    present = indices.unique().tolist()  # planned transfer; ascending

    def total(own: slice) -> Tensor:
        y = x.new_zeros(x.shape[0], out, dtype=torch.float32)
        for expert in (one for one in present if own.start <= one < own.stop):
            row, place = (indices == expert).nonzero(as_tuple=True)
            gate_up, down = planned[expert]
            y.index_add_(0, row, down(gate_mul(gate_up(x[row]), gate)).float() * weights[row, place, None])
        return y

    y = added([*map(total, pieces.spans)])
    return finished(y, None, x.dtype) if pieces.whole else y


def plan_shared_experts(plan: Callable[..., Experts], gate_up: StackedWeight, *others: Any, of: Devices) -> Experts:
    """Plan experts that several devices share. `plan`: op that plans the device's own ones; `others`: its further
    arguments. # gate_up [own experts, 2 * width, in]"""
    pieces = pieces_of(of.total(gate_up.shape[0]), 1)
    experts, first = plan(gate_up, *others, of.shard.part(pieces)), of.shard.span(pieces).start

    def run(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return finished(of.added(experts(x, indices - first, weights)), None, x.dtype)

    return run
