"""Block forwards of a few fixed shapes, captured when the drafter is built and replayed on static buffers.

A batch, its waiting entries and its window are padded with what nobody sees. Forwards that fit no shape, and those of
prompts, run as they are. Knows neither trees nor how capturing works.
Legend: batch, count = waiting entries, width = window positions, starts, block = K.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from drafters.specblock.growth import Origin, Picked
from drafters.specblock.model import Embed, SpecBlock
from drafters.specblock.pool import WAITING, EntryPool, Waiting
from drafters.specblock.serving import BlockForward, LiveRows, Reach, TreeForward, Window
from kernels.tree_attention import NULL_SLOT

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Makes a computation on tensors that stay where they are repeatable; runs it at least once."""

BATCHES = (1, 2, 4, 8, 16, 32)
COUNTS = (4, WAITING)
WIDTHS = (128, 256, 512)
_NOWHERE = -1


class Replayed:
    """A function of tensors in one shape: arguments are copied into buffers, and results stand in others."""

    def __init__(
        self, capture: Capture, function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]
    ) -> None:
        self._arguments = [argument.clone() for argument in arguments]
        self.results = [torch.zeros_like(result) for result in function(*self._arguments)]

        def compute() -> None:
            for place, result in zip(self.results, function(*self._arguments), strict=True):
                place.copy_(result)

        self._replay = capture(compute)

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Results are overwritten by the next call."""
        for place, argument in zip(self._arguments, arguments, strict=True):
            place.copy_(argument)
        self._replay()
        return self.results


@dataclass(frozen=True, slots=True)
class Shape:
    """What a capture of a tree's forwards is made for."""

    batch: int
    count: int
    width: int


class CapturedForwards:
    """Makes the forwards of one tree after the other; `starts` blocks begin in each forward after the first."""

    def __init__(
        self,
        model: SpecBlock,
        embed: Embed,
        pool: EntryPool,
        capture: Capture,
        *,
        max_batch: int,
        window: int,
        blocks: int,
        starts: int,
    ) -> None:
        self._model, self._embed, self._pool = model, embed, pool
        batches = [*(batch for batch in BATCHES if batch < max_batch), max_batch]
        widths = [*(width for width in WIDTHS if width < window), window]
        self._trees = {
            shape: _CapturedTree(model, embed, pool, capture, shape, blocks=blocks, starts=starts)
            for shape in (Shape(*sizes) for sizes in product(batches, COUNTS, widths))
        }

    def __call__(self, positions: Tensor, slots: Tensor) -> TreeForward:
        """The forwards of a tree that sees these positions, in these slots. # both [batch, width]"""

        def as_it_is() -> TreeForward:
            return BlockForward(self._model, self._embed, self._pool, Window.of(positions, slots, self._pool))

        return _Fitted(self._trees, positions, slots, as_it_is)


class _Fitted:
    """One tree's forwards: replayed where they fit a shape, which shows with the first."""

    def __init__(
        self,
        trees: dict[Shape, "_CapturedTree"],
        positions: Tensor,
        slots: Tensor,
        as_it_is: Callable[[], TreeForward],
    ) -> None:
        self._trees = trees
        self._positions, self._slots = positions, slots
        self._as_it_is = as_it_is
        self._begun: _CapturedTree | TreeForward | None = None

    def ingest(self, waiting: Waiting) -> None:
        self._as_it_is().ingest(waiting)

    def first(self, waiting: Waiting) -> Tensor:
        batch, count = waiting.tokens.shape
        shape = next(self._fitting(batch, count, self._positions.shape[1]), None)
        if shape is None:
            self._begun = forward = self._as_it_is()
            return forward.first(waiting)
        self._begun = tree = self._trees[shape]
        return tree.begin(waiting, self._positions, self._slots)

    def next(self, states: Tensor, picked: Picked, reach: Reach, roots: Tensor) -> Tensor:
        assert self._begun is not None, "a tree begins with its first forward"
        return self._begun.next(states, picked, reach, roots)

    def _fitting(self, batch: int, count: int, width: int) -> Iterator[Shape]:
        return (s for s in self._trees if s.batch >= batch and s.count >= count and s.width >= width)


class _CapturedTree:
    """The forwards of trees of one shape, the first and those that follow it."""

    def __init__(
        self,
        model: SpecBlock,
        embed: Embed,
        pool: EntryPool,
        capture: Capture,
        shape: Shape,
        *,
        blocks: int,
        starts: int,
    ) -> None:
        self._model, self._embed, self._pool, self._shape = model, embed, pool, shape
        self._batch = 0
        self._seen = _no_window(shape, pool)
        first = Replayed(capture, self._first, [*_no_entries(shape, model), *self._seen])
        self._forwards = [first]
        for _ in range(1, blocks):
            self._forwards.append(self._following(capture, self._forwards[-1], starts))
        self._number = 0

    def begin(self, waiting: Waiting, positions: Tensor, slots: Tensor) -> Tensor:
        """The first forward. # positions, slots [batch, width] -> [batch, block, hidden]"""
        self._batch, self._number = waiting.tokens.shape[0], 0
        shape = self._shape
        self._seen = [
            _fitted(positions, shape.batch, shape.width, _NOWHERE),
            _fitted(slots, shape.batch, shape.width, NULL_SLOT),
        ]
        entries = (
            _fitted(waiting.features, shape.batch, shape.count, 0),
            _fitted(waiting.tokens, shape.batch, shape.count, 0),
            _fitted(waiting.positions, shape.batch, shape.count, _NOWHERE),
            _fitted(waiting.slots, shape.batch, shape.count, NULL_SLOT),
        )
        return self._forwards[0](*entries, *self._seen)[0][: self._batch]

    def next(self, states: Tensor, picked: Picked, reach: Reach, roots: Tensor) -> Tensor:
        """As `TreeForward.next`; the states and rows of the forward before are still in their buffers."""
        before, missing = self._forwards[self._number], self._shape.batch - states.shape[0]
        self._number += 1
        chosen = (picked.tokens, picked.start, picked.position, picked.origin.depth, reach.path, reach.limits, roots)
        padded = [torch.cat([value, value[:1].expand(missing, *value.shape[1:])]) for value in chosen]
        return self._forwards[self._number](*padded, *self._seen, *before.results)[0][: self._batch]

    def _first(self, *values: Tensor) -> list[Tensor]:
        features, tokens, positions, slots, *seen = values
        forward = self._forward(seen, LiveRows(self._model.config.num_layers))
        return [forward.first(Waiting(features, tokens, positions, slots)), *forward.live.tensors()]

    def _next(self, *values: Tensor) -> list[Tensor]:
        tokens, start, position, depth, path, limits, roots, *rest = values
        seen, states, live = rest[:2], rest[2], rest[3:]
        forward = self._forward(seen, LiveRows.of(live))
        picked = Picked(Origin(start, depth, torch.ones_like(depth, dtype=torch.float32)), tokens, start, position)
        blocks = states if states.ndim == 4 else states[:, None]
        return [forward.next(blocks, picked, Reach(path, limits, 0), roots), *forward.live.tensors()]

    def _following(self, capture: Capture, before: Replayed, starts: int) -> Replayed:
        """The forward behind `before`, tried with its first nodes."""
        states, live = before.results[0], before.results[1]
        nodes = states.new_zeros(self._shape.batch, starts, dtype=torch.int64)
        path = nodes.new_zeros(*nodes.shape, live.shape[2], dtype=torch.bool)
        chosen = (nodes, nodes, nodes, nodes + 1, path, nodes, nodes[:, 0])
        return Replayed(capture, self._next, [*chosen, *self._seen, *before.results])

    def _forward(self, seen: Sequence[Tensor], live: LiveRows) -> BlockForward:
        window = Window.of(seen[0], seen[1], self._pool)
        return BlockForward(self._model, self._embed, self._pool, window, live)


def _no_entries(shape: Shape, model: SpecBlock) -> list[Tensor]:
    """Features, tokens, positions and slots of padding alone."""
    config, device = model.config, model.d2t.device
    tokens = torch.zeros(shape.batch, shape.count, dtype=torch.int64, device=device)
    width = len(config.tap_layers) * config.hidden_size
    features = torch.zeros(shape.batch, shape.count, width, dtype=model.dtype, device=device)
    return [features, tokens, tokens + _NOWHERE, tokens + NULL_SLOT]


def _no_window(shape: Shape, pool: EntryPool) -> list[Tensor]:
    """Positions and slots of padding alone."""
    nothing = torch.zeros(shape.batch, shape.width, dtype=torch.int64, device=pool.storage.device)
    return [nothing + _NOWHERE, nothing + NULL_SLOT]


def _fitted(values: Tensor, batch: int, columns: int, filler: int) -> Tensor:
    """Padded below, and to the left: the newest stand right. # [batch, columns, ...] -> larger"""
    padded = values.new_full((batch, columns, *values.shape[2:]), filler)
    padded[: values.shape[0], columns - values.shape[1] :] = values
    return padded
