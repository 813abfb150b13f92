"""Forwards of a kind whose layers run once in a tree: further blocks are states of that forward, told other tokens.
Legend: batch, starts as in drafters/specblock/serving.py; rows = positions the layers spoke of, hidden."""

from torch import Tensor

from drafters.specblock.model import Embed
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import Waiting
from drafters.specblock.serving import BlockForward
from kernels.lattice import Picked


class ConditionedForward:
    """Blocks of one position each; what stays of a forward are the states of all its rows."""

    def __init__(self, layers: BlockForward, network: ServingNetwork, embed: Embed) -> None:
        self._layers, self._network, self._embed = layers, network, embed
        self.ingest = layers.ingest

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Tensor]:
        """Run the layers, and tell the first state the newest token. # rows [batch]
        -> [batch, 1, 1, hidden]; [batch, rows, hidden]"""
        states, _ = self._layers.first(rows, waiting)
        return self._told(states[:, :, 0], waiting.tokens[:, -1:]), states[:, 0]

    def next(self, states: Tensor, picked: Picked, layers: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """The state behind each picked node. # layers [batch, rows, hidden] as of `first`
        -> [batch, starts, 1, hidden]"""
        row = picked.origin.depth[:, :, None].expand(-1, -1, layers.shape[2])
        return self._told(layers.gather(1, row), picked.tokens), layers

    def _told(self, states: Tensor, tokens: Tensor) -> Tensor:
        """# states [batch, starts, hidden], tokens [batch, starts] -> [batch, starts, 1, hidden]"""
        told = self._network.told(states.flatten(0, 1), self._embed(tokens.flatten()))
        return told.view(states.shape)[:, :, None]
