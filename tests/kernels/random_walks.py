"""Random verified steps: trees of a batch, the target's tokens, and how far they agree, written with ifs."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tree_attention import MAX_DEPTH


@dataclass(frozen=True)
class Tree:
    """One sequence's tree and what the target said of it."""

    tokens: list[int]
    parents: list[int]
    targets: list[int]  # after the root and after each node

    @staticmethod
    def draw(rng: random.Random, nodes: int) -> "Tree":
        reach = rng.choice([1, 3, nodes + 1])
        parents = [rng.randrange(max(-1, node - reach), node) for node in range(nodes)]
        tokens = [rng.randrange(3) for _ in range(nodes)]
        return Tree(tokens, parents, [rng.randrange(3) for _ in range(nodes + 1)])

    def walk(self) -> list[int]:
        """The accepted path."""
        path: list[int] = []
        here = -1
        while len(path) < MAX_DEPTH:
            wanted = self.targets[here + 1]
            agreeing = [i for i, parent in enumerate(self.parents) if parent == here and self.tokens[i] == wanted]
            if not agreeing:
                break
            here = agreeing[0]
            path.append(here)
        return path


def batch_of(trees: list[Tree], nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, parents, counts, target tokens; padding looks like children of the root that carry the wanted token."""

    def padded(rows: list[list[int]], fills: list[int], width: int) -> Tensor:
        full = [row + [fill] * (width - len(row)) for row, fill in zip(rows, fills, strict=True)]
        return torch.tensor(full, dtype=torch.int64).view(len(rows), width)

    return (
        padded([tree.tokens for tree in trees], [tree.targets[0] for tree in trees], nodes),
        padded([tree.parents for tree in trees], [-1] * len(trees), nodes),
        torch.tensor([len(tree.tokens) for tree in trees]),
        padded([tree.targets for tree in trees], [0] * len(trees), nodes + 1),
    )
