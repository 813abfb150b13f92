"""What an observed run writes down of each step: who proposed what, what was verified, and how the text went on.

Plain values without tensors, so that statistics can be checked on records made by hand. A node is named by its path:
the tokens from the root's child down to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TokenPath = tuple[int, ...]
Odds = Mapping[TokenPath, float]
"""Survival of each node of a tree, parents before children."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block that a trained drafter proposed."""

    forward: int  # which of the tree's forwards made it, from 0
    start: TokenPath  # the node at which it begins, () for the root
    tokens: tuple[tuple[int, ...], ...]  # [block][rank]
    classes: tuple[int, ...]  # [block], the likeliest rank class by the rank head

    def paths(self) -> list[TokenPath]:
        """Every node it proposes: the first ranks form its spine, the others hang beside it."""
        spine = tuple(ranks[0] for ranks in self.tokens)
        return [(*self.start, *spine[:place], token) for place, ranks in enumerate(self.tokens) for token in ranks]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one sequence."""

    root: int  # the last committed token before the step
    truth: TokenPath  # what followed the root, as far as the text went
    accepted: int  # accepted length; truth[accepted] is the bonus token
    candidates: Odds = field(default_factory=dict)  # the whole tree, all sources merged
    proposals: Mapping[str, Odds] = field(default_factory=dict)  # by source; empty when nobody was asked
    blocks: tuple[BlockRecord, ...] = ()
    verified: frozenset[TokenPath] = frozenset()

    @property
    def emitted(self) -> TokenPath:
        return self.truth[: self.accepted + 1]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[TokenPath]:
    """Paths of nodes that stand after their parents; a parent below 0 is the root."""
    paths: list[TokenPath] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
