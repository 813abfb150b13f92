"""Networks without layers (Medusa): entry k is h_k = c + silu(W_k c + b_k), with c made of the target's features alone.
Legend: rows, hidden, entries = heads of a block."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.config import SpecBlockConfig
from drafters.network.layers import DrafterDecoder, EntryHeads, Input, LayerShape
from drafters.network.structure import ServedInput, ServedOutput, Structure, WeightPlanner, normed_taps


class ResidualHeads(Input):
    """One residual head for each entry of a block; no head sees a token."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape) -> None:
        super().__init__()
        heads, hidden = config.block_size, shape.hidden
        self.condition_proj = nn.Linear(config.features_size, hidden, bias=False)
        self.heads_weight = nn.Parameter(torch.zeros(heads, hidden, hidden))
        self.heads_bias = nn.Parameter(torch.zeros(heads, hidden))
        self.feature_norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=shape.epsilon) for _ in normed_taps(config))

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return the heads' states. # context [..., hidden] -> [..., entries, hidden]"""
        weight, bias = self.heads_weight[entries], self.heads_bias[entries]
        seen = context.to(weight.dtype)[..., None, :]
        return seen + silu(torch.einsum("...i,koi->...ko", context.to(weight.dtype), weight) + bias)

    @torch.no_grad()
    def start_from(self, tap: int) -> None:
        """Make every head predict what the target's head says of one tap."""
        hidden = self.heads_bias.shape[1]
        self.condition_proj.weight.zero_()
        self.condition_proj.weight[:, tap * hidden : (tap + 1) * hidden] = torch.eye(hidden)


class HeadsStructure(Structure):
    """Residual heads before the output norm and one output layer."""

    def input_layer(self) -> Input:
        return ResidualHeads(self.config, self.shape)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        """Plan all heads as one product."""
        weight, bias = planner.weights["input_layer.heads_weight"], planner.weights["input_layer.heads_bias"]
        product, shape = planner.product(weight.flatten(0, 1), bias.flatten()), tuple(bias.shape)  # entries, hidden
        return lambda context, embedded: context[:, None] + silu(product(context).view(-1, *shape))


class OwnHeadsStructure(HeadsStructure):
    """Residual heads with an output layer each and no norm, as Medusa's authors publish them."""

    def decoder(self) -> DrafterDecoder:
        """Make no layers and no norm."""
        return DrafterDecoder(self.shape, 0, normed=False)

    def head(self) -> nn.Linear | EntryHeads:
        """Make an output layer for each entry."""
        return EntryHeads(self.config.block_size, self.config.hidden_size, self.config.draft_vocab_size)

    def served_output(self, planner: WeightPlanner) -> ServedOutput:
        """Return states as they are."""
        return lambda hidden, delta: hidden

    def served_head(self, planner: WeightPlanner) -> Callable[[Tensor], Tensor]:
        """Plan each entry's output layer: states [..., entries, hidden] -> [..., entries, vocab]."""
        products = [planner.product(weight) for weight in planner.weights["lm_head.weight"]]

        def logits(states: Tensor) -> Tensor:
            by_entry = zip(products, states.unbind(-2), strict=True)
            return torch.stack([product(own.contiguous()) for product, own in by_entry], dim=-2)

        return logits
