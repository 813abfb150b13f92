"""Forwards of kinds whose committed positions run no layer: each layer's keys and values are made of their condition.
Legend: batch, count as in drafters/specblock/serving.py; a position's condition stands at the position itself, and the
first entry of a block at the token behind it."""

import torch
from torch import Tensor

from drafters.specblock.pool import Waiting
from drafters.specblock.serving import BlockForward, Nodes, Path
from kernels.decoder_layer import RowPlaces


class _Nobody:
    """Attention of rows that ask for nothing."""

    def attend(
        self, query: Tensor, pool: Tensor, *, scale: float, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        raise AssertionError("rows that are only stored attend to nothing")


class InjectedForward(BlockForward):
    """Stores the conditions of what waits, and runs blocks alone."""

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """As of `BlockForward`."""
        self._inject(waiting)

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Nodes]:
        """As of `BlockForward`."""
        context = self._inject(waiting)
        batch = len(rows)
        above = torch.zeros(batch, 1, 0, dtype=torch.bool, device=rows.device)
        none = torch.zeros(batch, 0, dtype=torch.int64, device=rows.device)
        nodes = Nodes(rows, self._state.known(rows) - 1, none, none, above[:, :0])
        root = torch.zeros(batch, 1, dtype=torch.int64, device=rows.device)
        positions = waiting.positions[:, -1:].clamp(min=0) + 1
        return self._begin(context[:, -1:], waiting.tokens[:, -1:], Path(above, root), positions, nodes)

    def _inject(self, waiting: Waiting) -> Tensor:
        """The conditions of what waits, which are there for attention from now on. # -> [batch, count, hidden]"""
        context = self._network.condition(waiting.features.flatten(0, 1))
        cos, sin = self._rotary(waiting.positions.clamp(min=0).flatten())
        places = RowPlaces(cos, sin, self._pool.places(waiting.slots).flatten().contiguous(), _Nobody())
        self._network.inject(context, places, self._pool.storage)
        return context.view(*waiting.tokens.shape, -1)
