"""Guesses for the positions ahead of each running sequence, as of Jacobi iteration: what the target chose at a position
behind a path that was rejected is the next guess for that position. The guesses are nodes of the tree, so that
verifying it is the iteration; at a temperature above 0 each was chosen with the very noise of its position.
Legend: rows = sequences of the engine's table, batch = some of them; nodes as in drafters/tree.py; window = positions
from the root's child on."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.tree import DraftTree
from kernels.ngrams import NOTHING


class Guesses:
    """A window for each row; behind the rows one of nobody's."""

    def __init__(self, max_sequences: int, window: int, device: torch.device | str) -> None:
        self._tokens = torch.full((max_sequences + 1, window), NOTHING, device=device)
        self._stable = torch.zeros(max_sequences + 1, window, dtype=torch.bool, device=device)
        self._ahead = torch.arange(window, device=device)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses, NOTHING where there is none, and whether the target has chosen them twice. # both [batch, window]"""
        return self._tokens[rows], self._stable[rows]

    def move(self, rows: Tensor, counts: Tensor, tree: DraftTree, choices: Tensor) -> None:
        """On to the positions behind counts[b] more tokens, with what the target chose there behind the likeliest node
        that was rejected. # counts [batch], choices [batch, nodes + 1], NOTHING where nothing was verified"""
        behind = (counts[:, None] + self._ahead).clamp(max=len(self._ahead))  # [batch, window]
        guesses = pad(self._tokens[rows], (0, 1), value=NOTHING).gather(1, behind)
        stable = torch.zeros_like(guesses, dtype=torch.bool)
        if tree.width:
            # A node at this depth stands right before the position: counts = accepted + 1 is that of the new root.
            before = tree.depths[:, None] == (counts[:, None] + self._ahead)[:, :, None]  # [batch, window, nodes]
            before = before & (choices[:, None, 1:] != NOTHING)
            likeliest = torch.where(before, tree.survival[:, None], -1.0).max(2)
            chosen, is_new = choices[:, 1:].gather(1, likeliest.indices), likeliest.values >= 0
            stable = is_new & (chosen == guesses)
            guesses = torch.where(is_new, chosen, guesses)
        self._tokens.index_copy_(0, rows, guesses)
        self._stable.index_copy_(0, rows, stable)

    def forget(self, rows: list[int]) -> None:
        """These texts go on otherwise, or not at all."""
        self._tokens[rows] = NOTHING
        self._stable[rows] = False
