"""Medusa (arXiv 2401.10774): K = 4 residual heads, h_k = c + silu(W_k c + b_k), one for each position ahead, then the
norm and the head. No layers, no keys and values, and no head sees a token.

The condition c is made of the tapped features and starts as the highest tap, where the paper takes the last layer's
state; and all heads share one output layer. Legend: rows, hidden, block = heads."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.config import DrafterConfig, Fields, NetworkTraits
from drafters.network.form import TrainedKind
from drafters.network.layers import Embed, Input, LayerShape
from drafters.network.pool import EntryPool, EntryState, Waiting
from drafters.network.served import ServingNetwork
from drafters.network.structure import ServedInput, Structure, WeightPlanner, feature_norms
from drafters.training.forward import TrainingForward
from kernels.lattice import Picked


@dataclass(frozen=True, slots=True)
class MedusaConfig(DrafterConfig):
    """A Medusa drafter."""

    kind: ClassVar[str] = "medusa"
    trained_blocks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.num_layers or self.block_size < 1:
            raise ValueError("drafter config: Medusa has heads, block_size, and no layers")

    def structure(self) -> Structure:
        return HeadsStructure(self)

    @property
    def options(self) -> Fields:
        return {"shift": False}

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(len(self.tap_layers))


class ResidualHeads(Input):
    """One residual head for each entry of a block."""

    is_solved = False

    def __init__(self, config: DrafterConfig, shape: LayerShape) -> None:
        super().__init__()
        heads, self._hidden = config.block_size, shape.hidden
        self._top = config.tap_layers.index(max(config.tap_layers))
        self.condition_proj = nn.Linear(config.features_size, self._hidden, bias=False)
        self.heads_weight = nn.Parameter(torch.zeros(heads, self._hidden, self._hidden))
        self.heads_bias = nn.Parameter(torch.zeros(heads, self._hidden))
        self.feature_norms = feature_norms(config, shape.epsilon)

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        weight, bias = self.heads_weight[entries], self.heads_bias[entries]
        seen = context.to(weight.dtype)
        return seen[..., None, :] + silu(torch.einsum("...i,koi->...ko", seen, weight) + bias)

    @torch.no_grad()
    def start(self, embed: Embed) -> None:
        """Make every head predict what the target's head says of the highest tap."""
        self.condition_proj.weight.zero_()
        tap = slice(self._top * self._hidden, (self._top + 1) * self._hidden)
        self.condition_proj.weight[:, tap] = torch.eye(self._hidden)


class HeadsForward:
    """Computes the heads at the newest position; nothing is kept of committed ones."""

    def __init__(self, network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> None:
        self._network, self._embed = network, embed

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Do nothing. # rows [batch]"""

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Tensor]:
        """Compute the block at the newest entry. # rows [batch] -> [batch, 1, block, hidden]"""
        context = self._network.condition(waiting.features[:, -1])
        return self._network.blocks(context, self._embed(waiting.tokens[:, -1]))[:, None], rows

    def next(self, states: Tensor, picked: Picked, live: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Trees have one block. # states [batch, starts, block, hidden], roots [batch]"""
        raise AssertionError("Medusa drafts one block")


class HeadsStructure(Structure):
    """Residual heads, the output norm and one output layer."""

    serving = HeadsForward
    training = TrainingForward

    def input_layer(self) -> Input:
        return ResidualHeads(self.config, self.shape)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        """Plan all heads as one product, and the norm after them."""
        weight, bias = planner.weights["input_layer.heads_weight"], planner.weights["input_layer.heads_bias"]
        product, norm = planner.product(weight.flatten(0, 1), bias.flatten()), self.served_output(planner)

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            heads = context[:, None] + silu(product(context).view(-1, *bias.shape))
            return norm(heads.flatten(0, 1), None).view(heads.shape)

        return blocks


KIND = TrainedKind(MedusaConfig, {"block_size": 4, "num_layers": 0, "shift": False})
