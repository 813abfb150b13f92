"""Feed-forwards of decoder layers: dense, by chosen experts, or both.

Legend: rows = tokens of one forward, hidden = the model's width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.experts import Experts, Router
from kernels.layers import GateForm, Product
from kernels.ops import Ops


def opened(y: Tensor, gate: Tensor, ops: Ops) -> Tensor:
    """y round(sigmoid(gate)), by the op, in which an element's bits do not depend on the number of rows.
    # y [rows, width], gate [rows, width or 1] -> like y"""
    return ops.gate_mul(torch.cat((gate.expand_as(y), y), dim=-1), GateForm("sigmoid"))


class FeedForwardOp(Protocol):
    """The feed-forward of a layer."""

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        """Compute the output from the normed states `x` or the hidden states. # both [rows, hidden] -> like x"""


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """down(gate(gate_up(x)))."""

    ops: Ops
    gate_up: Product
    down: Product
    gate: GateForm

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.down(self.ops.gate_mul(self.gate_up(x), self.gate))


@dataclass(frozen=True, slots=True)
class SparseFeedForward:
    """The weighted sum of chosen experts' outputs, plus that of a shared expert if there is one."""

    ops: Ops
    router: Router
    logits: Product  # scores of experts
    correction: Tensor | None  # [experts], added to scores for the choice alone
    expert_scale: Tensor | None  # [experts], factor on the weights of the chosen
    experts: Experts
    shared: DenseFeedForward | None
    shared_gate: Product | None  # of one column, whose sigmoid multiplies the output of the shared expert

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.routed(x, x)
        if self.shared is None:
            return y
        beside = self.shared(x, hidden)
        return y.add_(beside if self.shared_gate is None else opened(beside, self.shared_gate(x), self.ops))

    def routed(self, x: Tensor, seen: Tensor) -> Tensor:
        """Sum up the outputs of the experts that the router chooses for `seen`. # x, seen [rows, hidden] -> like x"""
        given = seen.float() if self.router.scores == "sigmoid" else seen
        logits = self.logits(given).float()
        return self.experts(x, *self.ops.choose_experts(logits, self.router, self.correction, self.expert_scale))


@dataclass(frozen=True, slots=True)
class ParallelFeedForward:
    """A dense feed-forward, and experts beside it on the hidden states: the sum of the norms of their outputs."""

    dense: DenseFeedForward
    sparse: SparseFeedForward
    norm: Callable[[Tensor, Tensor], Tensor]  # x [rows, hidden], weight [hidden] -> like x
    router_norm: Tensor  # [hidden], like the others
    input_norm: Tensor
    output_norms: tuple[Tensor, Tensor]

    def __call__(self, x: Tensor, hidden: Tensor) -> Tensor:
        beside = self.sparse.routed(self.norm(hidden, self.input_norm), self.norm(hidden, self.router_norm))
        y = self.norm(self.dense(x, hidden), self.output_norms[0])
        return y.add_(self.norm(beside, self.output_norms[1]))
