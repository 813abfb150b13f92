"""The blocks of draft trees in a few fixed shapes, captured when the drafter is built and replayed on static buffers.

A batch is padded with rows of nobody's, its waiting entries and its window with what nobody sees. Trees that fit no
shape grow as they are. Knows neither what a block is nor how capturing works.
Legend: batch, waiting, width as in blocks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from drafters.specblock.blocks import AsItIs, Block, Blocks, Ground, Growing, Keys, Sizes
from drafters.specblock.pool import WAITING, Entries
from drafters.tree import Candidates, DraftTree
from kernels.graph_runner import Capture, Places, Replayed, Result, batches_up_to, least

COUNTS = (4, WAITING)
WIDTHS = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class _Replays:
    """The blocks of trees in one batch, width and warmth."""

    keys: Keys
    first: dict[int, Replayed[tuple[Ground, Block]]]  # by how many entries can wait
    further: list[Replayed[Block]]

    @property
    def grown(self) -> tuple[Ground, list[Block]]:
        """Where all results stand."""
        ground, block = self.first[COUNTS[0]].results
        return ground, [block, *(replayed.results for replayed in self.further)]


class CapturedBlocks:
    """Begins trees in the smallest shapes that hold them."""

    def __init__(self, blocks: Blocks, capture: Capture, *, max_batch: int, window: int, nobody: int) -> None:
        """`window` is the widest there is, `nobody` the row that pads batches."""
        self._blocks, self._capture, self._nobody = blocks, capture, nobody
        self._keys = torch.tensor([[nobody], [0], [0]], device=blocks.device).repeat(1, max_batch)  # rows, seeds, roots
        self._temperatures = torch.zeros(max_batch, device=blocks.device)
        self._batches = batches_up_to(max_batch)
        self._widths = [*(width for width in WIDTHS if width < window), window]
        self._first_places: Places[tuple[Ground, Block]] = Places()
        self._further_places: list[Places[Block]] = [Places() for _ in range(1, blocks.shape.blocks)]
        self._tree_places: list[Places[tuple[Tensor, ...]]] = [Places() for _ in range(blocks.shape.blocks)]
        self._replays: dict[tuple[int, int, bool], _Replays] = {}
        self._trees: dict[int, list[Replayed[tuple[Tensor, ...]]]] = {}  # by batch; of one block, of two, ...
        for batch in self._batches:
            for width, warm in product(reversed(self._widths), (True, False)):
                self._replays[batch, width, warm] = self._captured(batch, width, warm)
            self._trees[batch] = self._captured_trees(self._replays[batch, window, True])

    def __call__(self, keys: Keys, sizes: Sizes) -> Growing:
        """Trees of these sequences; as they are where no shape holds them."""
        batch = keys.rows.shape[0]
        padded, width = least(self._batches[::-1], batch), least(self._widths, sizes.width)
        count = least(COUNTS, sizes.waiting)
        if padded is None or width is None or count is None:
            return AsItIs(self._blocks, keys, sizes)
        replays = self._replays[padded, width, sizes.warm]
        replays.keys.rows[batch:].fill_(self._nobody)
        for place, values in zip(replays.keys, keys, strict=True):
            place[:batch].copy_(values)
        return _Trees(replays, self._trees[padded], count, batch)

    def _captured(self, batch: int, width: int, warm: bool) -> _Replays:
        rows, seeds, roots = self._keys[:, :batch]
        keys = Keys(rows, seeds, self._temperatures[:batch], roots)
        first = {
            count: self._replayed(partial(self._blocks.begin, keys, Sizes(count, width, warm)), self._first_places)
            for count in COUNTS
        }
        replays = _Replays(keys, first, [])
        for places in self._further_places:
            follow = partial(self._blocks.follow, keys, *replays.grown)
            replays.further.append(self._replayed(follow, places))
        return replays

    def _captured_trees(self, replays: _Replays) -> list[Replayed[tuple[Tensor, ...]]]:
        """They depend on neither width nor warmth, and results of all of these stand in the same places."""
        ground, grown = replays.grown
        return [
            self._replayed(partial(self._blocks.tree, replays.keys, ground, grown[: number + 1]), places)
            for number, places in enumerate(self._tree_places)
        ]

    def _replayed(self, function: Callable[[], Result], places: Places[Result]) -> Replayed[Result]:
        return Replayed(self._capture, function, places)


class CapturedEntries:
    """A function of committed entries, replayed by batch."""

    def __init__(self, function: Callable[[Entries], Tensor], capture: Capture, padding: Entries) -> None:
        """`padding` is as large as any batch; its tensors become the buffers."""
        self._function, self._buffers = function, padding
        self._nothing = [value.clone() for value in padding[:3]]  # rows, positions and counts of nobody's
        places: Places[Tensor] = Places()
        self._replays = {
            batch: Replayed(capture, partial(function, Entries(*(value[:batch] for value in padding))), places)
            for batch in batches_up_to(padding.rows.shape[0])
        }

    def __call__(self, entries: Entries) -> Tensor:
        """As the function itself, which is called where there are more of them than fit."""
        batch, count = entries.tokens.shape
        padded = least(sorted(self._replays), batch)
        if padded is None or count > self._buffers.tokens.shape[1]:
            return self._function(entries)
        for place, nothing in zip(self._buffers, self._nothing, strict=False):
            place[batch:padded].copy_(nothing[batch:padded])
        for place, values in zip(self._buffers, entries, strict=True):
            place[tuple(map(slice, values.shape[:2]))].copy_(values)
        return self._replays[padded]()


class _Trees:
    """A batch of trees while it grows by replays, at the head of buffers that may hold more."""

    def __init__(self, replays: _Replays, trees: list[Replayed[tuple[Tensor, ...]]], count: int, batch: int) -> None:
        self._replays, self._trees, self._batch = replays, trees, batch
        _, self._block = replays.first[count]()
        self._number = 0

    @property
    def promise(self) -> Tensor:
        return self._block.further[0].picked.origin.survival[: self._batch]

    def grow(self) -> None:
        self._block = self._replays.further[self._number]()
        self._number += 1

    def candidates(self) -> Candidates:
        return DraftTree(*self._trees[self._number]()).first(self._batch)
