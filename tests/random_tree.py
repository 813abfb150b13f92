"""The drafter `random`, a plug-in of the tests (tests/plugins): random trees that in part follow a known answer, the
sequence's `prediction`.
Legend: batch, nodes as in drafters/tree.py."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.kinds import Kind
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise
from drafters.tree import MAX_DEPTH, ROOT, Candidates, DraftTree
from kernels.trees import ancestor_matrix

_STRIDE = 2_147_483_647  # a prime above any vocabulary, hence coprime to its size: multiples of it never collide early


class RandomTreeDrafter(Drafter):
    """Random topology; under each parent one child carries the answer's token with probability `hit_rate`."""

    name = "random"

    def __init__(self, sizes: DraftingSizes, *, seed: int = 0, hit_rate: float = 0.7) -> None:
        self._generator = torch.Generator(sizes.device).manual_seed(seed)
        self._vocab_size = sizes.vocab_size
        self._max_nodes = sizes.max_nodes
        self._hit_rate = hit_rate
        self._answers = torch.full((sizes.max_sequences, sizes.max_length + MAX_DEPTH), -1, device=sizes.device)
        self._generated = torch.zeros(sizes.max_sequences, dtype=torch.int64, device=sizes.device)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            answer = torch.tensor(list(context.prediction[: self._answers.shape[1]]), dtype=torch.int64)
            self._answers[context.row] = -1
            self._answers[context.row, : len(answer)] = answer.to(self._answers.device)
            self._generated[context.row] = context.num_generated

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        batch = rows.shape[0]
        depths = random_depths(batch, self._max_nodes, self._generator)
        parents = random_parents(depths, self._generator)
        tokens = self._tokens(rows, depths, parents)
        survival = self._survival(parents)
        num_nodes = self._draw_int(self._max_nodes + 1, (batch,))
        valid = torch.arange(self._max_nodes, device=rows.device) < num_nodes[:, None]
        return DraftTree(tokens * valid, torch.where(valid, parents, ROOT), depths * valid, survival * valid, num_nodes)

    def commit(self, committed: Committed) -> None:
        self._generated[committed.rows] += committed.counts

    def _tokens(self, rows: Tensor, depths: Tensor, parents: Tensor) -> Tensor:
        """Under some parents a child drawn for each has the answer's token, and its siblings have others."""
        (batch, nodes), vocab = parents.shape, self._vocab_size
        ranks, siblings = sibling_ranks(parents)
        places = (self._generated[rows][:, None] + depths - 1).clamp(max=self._answers.shape[1] - 1)
        answers = self._answers[rows].gather(1, places)
        chosen = self._draw_int(1 << 30, (batch, nodes + 1)).gather(1, parents + 1) % siblings
        hit = torch.rand(batch, nodes + 1, generator=self._generator, device=parents.device) < self._hit_rate
        tokens = random_tokens(parents, ranks, vocab, self._generator)
        around = (answers + (ranks - chosen) * (_STRIDE % vocab)) % vocab
        return torch.where(hit.gather(1, parents + 1) & (answers >= 0), around, tokens)

    def _survival(self, parents: Tensor) -> Tensor:
        draw = torch.rand(parents.shape, generator=self._generator, device=parents.device)
        conditional = 0.1 + 0.85 * draw
        return (ancestor_matrix(parents).float() @ conditional.log()[:, :, None]).squeeze(-1).exp()

    def _draw_int(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self._generator.device)


KIND = Kind(lambda parts: RandomTreeDrafter(parts.sizes))


def random_depths(batch: int, nodes: int, generator: torch.Generator) -> Tensor:
    """Depths that rise by at most one from node to node, with a random share between bush and chain for each tree.
    # -> [batch, nodes] int64 in 1..MAX_DEPTH"""
    share = torch.rand(batch, 1, generator=generator, device=generator.device)
    deeper = torch.rand(batch, nodes, generator=generator, device=generator.device) < share
    deeper[:, :1] = True
    return deeper.long().cumsum(1).clamp(max=MAX_DEPTH)


def random_parents(depths: Tensor, generator: torch.Generator) -> Tensor:
    """For each node a random one of the level above. # depths [batch, nodes] rising -> [batch, nodes]"""
    first = torch.searchsorted(depths, depths - 1)
    after = torch.searchsorted(depths, depths)
    draw = torch.rand(depths.shape, generator=generator, device=generator.device)
    parents = first + (draw * (after - first)).long()
    return torch.where(depths == 1, ROOT, parents)


def sibling_ranks(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Return each node's index among its siblings, and their number. # parents [batch, nodes]"""
    same = parents[:, :, None] == parents[:, None, :]  # [batch, nodes, nodes]
    return same.tril(-1).sum(-1), same.sum(-1)


def random_tokens(parents: Tensor, ranks: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Draw tokens that differ among the children of one parent, as long as there are enough tokens.
    # parents, ranks [batch, nodes] -> the same"""
    batch, nodes = parents.shape
    bases = torch.randint(vocab_size, (batch, nodes + 1), generator=generator, device=generator.device)
    return (bases.gather(1, parents + 1) + ranks * (_STRIDE % vocab_size)) % vocab_size
