"""Random verified steps: trees of a batch, the target's tokens, and how far they agree, written with ifs."""

import random
from dataclasses import dataclass

from kernels.tree_attention import MAX_DEPTH


@dataclass(frozen=True)
class Tree:
    """One sequence's tree and the target's choices."""

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
