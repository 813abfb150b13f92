"""What each row's last tree said of its nodes, kept until the text tells what became of them.

Legend: rows = sequences of the engine's table, nodes = those of a merged tree, batch = some rows.
"""

import torch
from torch import Tensor

from drafters import merging
from drafters.specblock.calibration import Calibration
from drafters.tree import ROOT, Candidates


class Fates:
    """The nodes of every row's last tree; behind the rows stands one of nobody's, which pads batches."""

    def __init__(
        self, calibration: Calibration, *, max_sequences: int, max_nodes: int, device: torch.device | str
    ) -> None:
        """`calibration` learns from them."""
        shape = (max_sequences + 1, max_nodes)
        self._calibration = calibration
        self._hashes = torch.full(shape, merging.NO_HASH, dtype=torch.int64, device=device)
        self._parents = torch.full_like(self._hashes, ROOT)
        self._buckets = torch.zeros_like(self._hashes)
        self._depths = torch.zeros_like(self._hashes)
        self._predicted = torch.zeros(shape, device=device)

    def forget(self, rows: list[int]) -> None:
        """Nothing has been said of these rows."""
        self._hashes[rows] = merging.NO_HASH

    def keep(self, rows: Tensor, tree: Candidates, predicted: Tensor, buckets: Tensor) -> None:
        """These rows' trees, with what was predicted of each node and its bucket. # both [batch, nodes]"""
        said = (
            (self._hashes, merging.node_hashes(tree)),
            (self._parents, tree.parents),
            (self._depths, tree.depths),
            (self._predicted, predicted),
            (self._buckets, buckets),
        )
        for table, values in said:
            table[:, : tree.width].index_copy_(0, rows, values)

    def learn(self, rows: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """Calibrate by what was committed; says how many accepted tokens came from blocks after a tree's first, and
        how many tokens there are.

        rows, counts [batch]; tokens [batch, depth + 1] -> [2] int64
        """
        hashes, parents, buckets = self._hashes[rows], self._parents[rows], self._buckets[rows]
        true = merging.came_true(hashes, tokens, counts)
        tried = torch.where(parents < 0, True, true.gather(1, parents.clamp(min=0))) & (hashes != merging.NO_HASH)
        self._calibration.observe(buckets, self._predicted[rows], true, tried)
        further = (buckets >= self._calibration.first_further) & (self._depths[rows] < counts[:, None])
        self._hashes.index_fill_(0, rows, merging.NO_HASH)
        return torch.stack([(true & tried & further).sum(), counts.sum()])
