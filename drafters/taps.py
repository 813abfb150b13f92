"""Features of the layers that two drafters tap between them, of which each is told its own."""

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from drafters.protocol import Committed, Drafter, Read

_Told = TypeVar("_Told", Read, Committed)


class SharedTaps:
    """Layers that are tapped for two: those of the first, then what the second taps beside them."""

    def __init__(self, first: Drafter, second: Drafter) -> None:
        others = (layer for layer in second.tap_layers if layer not in first.tap_layers)
        self.layers = (*first.tap_layers, *others)

    def told(self, one: Drafter, what: _Told, *, follow: bool) -> _Told:
        """As this one is to be told of it; `follow`: whether that one follows texts at present."""
        features = None if what.features is None else self._tapped(one, what.features)
        return replace(what, features=features, follow=what.follow and follow)

    def _tapped(self, one: Drafter, features: Tensor) -> Tensor:
        """Of the layers that this one taps. # [..., taps * hidden]"""
        if one.tap_layers == self.layers or not one.tap_layers:
            return features
        parts = dict(zip(self.layers, features.chunk(len(self.layers), dim=-1), strict=True))
        return torch.cat([parts[layer] for layer in one.tap_layers], dim=-1)
