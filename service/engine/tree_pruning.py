"""Prunes a drafter's candidates to the trees that are verified: chooses the width in which trees are laid out and the
nodes that are kept, and lets the survival calibration learn from the outcome.

Legend: batch = drafting sequences, nodes as in drafters/tree.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.calibration import SurvivalCalibration
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels import ops
from kernels.graph_runner import Capture, GraphRunner, batches_up_to, leading
from kernels.survival import Pruned

TREE_WIDTHS = (7, 15, 31, 63, 127)
"""Widths (nodes per tree) in captured steps: with the root a power of two, the tile sizes of the kernels."""
_NO_SEQUENCE = -1


def tree_widths_up_to(max_nodes: int) -> tuple[int, ...]:
    """Widths to capture for trees of at most `max_nodes` nodes; the largest is `max_nodes` itself."""
    return (*(width for width in TREE_WIDTHS if width < max_nodes), max_nodes) if max_nodes else ()


class TreeWidth:
    """Chooses the number of node rows that a step lays out per tree.

    An eager step lays out as many rows as each tree has nodes. A captured step has one width for all trees, chosen by
    the number of nodes that the previous step wanted: reading the device's choice for this step would leave the device
    idle until the next launch. A row costs the same whether it holds a node or padding, so each tree is filled with its
    likeliest nodes, even if fewer would have been chosen.
    """

    def __init__(self, max_nodes: int, device: str | torch.device = "cpu", *, captured: bool) -> None:
        self.choices = (0, *tree_widths_up_to(max_nodes)) if captured else None  # rising; eager steps allow any width
        self.on_device = torch.tensor(self.choices, device=device) if captured else None  # [choices] int64
        self._wanted = 1  # nodes that the previous step wanted in its largest tree

    def choose(self, candidates: Candidates, free_slots: int, max_nodes: int) -> int:
        """Choose the width of the step's trees. In captured steps it is the smallest that holds the nodes wanted by the
        previous step, at most `max_nodes`, or the largest of which all trees fit into `free_slots`; 0 only if no width
        fits."""
        if self.choices is None:
            return candidates.width
        fitting = [width for width in self.choices[1:] if width * candidates.batch <= free_slots]
        enough = [width for width in fitting if width >= min(self._wanted, max_nodes)]
        return min(enough, default=max(fitting, default=0))

    def node_rows(self, tree_sizes: Tensor, width: int) -> list[int]:
        """Number of rows to lay out for each tree. # tree_sizes [batch, SIZES], see `Pruned`; width from `choose`"""
        if self.choices is None:
            return [kept for _, kept, _ in tree_sizes.tolist()]  # planned transfer: how large the step will be
        return [width] * tree_sizes.shape[0]

    def learn(self, wanted: Sequence[int]) -> None:
        """Remember the number of nodes wanted in each tree of a step, for the next step's width. # wanted [trees]"""
        self._wanted = max(wanted, default=0)


class TreePruning:
    """Corrects survival by the calibration and keeps the likeliest nodes of each tree, eagerly or by CUDA graphs of
    padded batches."""

    def __init__(
        self,
        calibration: SurvivalCalibration,
        *,
        capture: Capture | None = None,
        max_batch: int = 0,
        width: TreeWidth,
        is_priced: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """With `capture`, trees have one of the widths in `width.choices`, and candidates are at most as wide as the
        largest. `is_priced`: whether `prune` gets the seconds of the step by number of nodes."""
        self.calibration, self.width = calibration, width
        self._pruned: Pruned
        choices = width.choices or (0,)
        nodes = torch.zeros(max_batch, choices[-1], dtype=torch.int64, device=device)
        none, ones = nodes.new_zeros(max_batch), torch.ones(max_batch, device=device)
        self._ops = ops.on(nodes.device)
        seconds = torch.full((len(choices) if is_priced else 0,), torch.inf, device=device)
        candidates = DraftTree(nodes, nodes + ROOT, nodes, nodes.float(), none)
        per_sequence = candidates, none, none + _NO_SEQUENCE, ones
        shapes = [(most, batch) for most in choices[:0:-1] for batch in batches_up_to(max_batch)] if capture else []
        padding = (((*leading(per_sequence, batch), seconds, most), ()) for most, batch in shapes)
        self._prune = GraphRunner(self._run_prune, capture, padding)
        tokens = torch.zeros(max_batch, MAX_DEPTH + 1, dtype=torch.int64, device=device)
        kept = zip(shapes, self._prune.results, strict=True)
        learnt = (((tokens[:batch], none[:batch]), pruned) for (_, batch), pruned in kept)
        self._learn = GraphRunner(self._run_learn, capture, learnt)

    def prune(
        self,
        candidates: Candidates,
        max_depth: Tensor,
        max_nodes: Tensor,
        seconds: Tensor,
        weights: Tensor,
        width: int,
    ) -> tuple[DraftTree, Tensor]:
        """Keep the nodes that maximise expected tokens per second, and remember the trees for the next `learn`.

        max_depth, max_nodes [batch] int64 bound each tree; seconds [choices] float32, see `CostBudget.step_seconds`;
        weights [batch] float32 -> trees [batch or more, width], with a capture's padding; tree_sizes [batch, SIZES]
        """
        pruned = self._prune((candidates, max_depth, max_nodes, weights, seconds, width))
        self._pruned = pruned
        return pruned.trees, pruned.sizes[: candidates.batch]

    def learn(self, tokens: Tensor, counts: Tensor) -> None:
        """Update the survival calibration by the tokens that were committed after the last `prune`.
        # tokens [batch, longest], counts [batch], see `Committed`"""
        self._learn((tokens, counts), self._pruned)

    def _run_prune(
        self, candidates: Candidates, max_depth: Tensor, max_nodes: Tensor, weights: Tensor, seconds: Tensor, width: int
    ) -> Pruned:
        rates, widths = self.calibration.rates, self.width.on_device
        return self._ops.prune_trees(candidates, max_depth, max_nodes, rates, seconds, weights, width, widths)

    def _run_learn(
        self, tokens: Tensor, counts: Tensor, trees: DraftTree, claimed: Tensor, buckets: Tensor, tree_sizes: Tensor
    ) -> tuple[()]:
        self.calibration.learn(trees, claimed, buckets, tokens, counts)
        return ()
