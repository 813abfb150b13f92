"""Residual heads as they serve."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from drafters.specblock.hand import Hand


class ServedHeads:
    """As `ResidualHeads.blocks`, of all entries, in one product."""

    def __init__(self, hand: Hand) -> None:
        weight, bias = hand.weights["input_layer.heads_weight"], hand.weights["input_layer.heads_bias"]
        self._shape = tuple(bias.shape)  # heads, hidden
        self._product = hand.product(weight.flatten(0, 1), bias.flatten())

    def __call__(self, context: Tensor, embedded: Tensor) -> Tensor:
        """# [rows, hidden] -> [rows, block, hidden]"""
        return context[:, None] + silu(self._product(context).view(-1, *self._shape))


class ServedEntryHeads:
    """As `EntryHeads`."""

    def __init__(self, hand: Hand) -> None:
        self._products = [hand.product(weight) for weight in hand.weights["lm_head.weight"]]

    def __call__(self, states: Tensor) -> Tensor:
        """# [..., entries, hidden] -> [..., entries, vocab]"""
        by_entry = zip(self._products, states.unbind(-2), strict=True)
        return torch.stack([product(own.contiguous()) for product, own in by_entry], dim=-2)
