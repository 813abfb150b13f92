"""The memory's calls as captures: padded batches change nothing."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftContext, DraftingSizes, MemorySizes, Noise
from drafters.random_tree import RandomTreeDrafter
from drafters.tree import VerifyResult
from kernels.trees import DraftTree, select_nodes
from tests.kernels.tensor_program import kernels, record

torch.set_num_threads(1)

MEMORY = MemorySizes(num_bytes=1 << 16)
SIZES = DraftingSizes(max_sequences=4, max_length=64, max_nodes=8, vocab_size=6, memory=MEMORY)


def test_captured_and_padded_nothing_changes() -> None:
    """Trees, credits and all that is remembered, of one to four texts, with a network that is asked."""
    rng = random.Random(1)
    with kernels():
        drafters = [
            MemoryDrafter(replace(SIZES, capture=capture), RandomTreeDrafter(SIZES, seed=2))
            for capture in (None, record)
        ]
        texts = [[rng.randrange(6) for _ in range(20)] for _ in range(4)]
        contexts = [DraftContext(row, text, scope="a", warm=row == 3) for row, text in enumerate(texts)]
        for drafter in drafters:
            drafter.start(contexts)
        for step in range(16):
            rows = torch.tensor(rng.sample(range(4), 1 + step % 4))
            noise = Noise(rows, torch.zeros(len(rows)), rows + step, warm=3 in rows.tolist())
            grown = [DraftTree(*map(torch.clone, drafter.grow(rows, noise))) for drafter in drafters]
            assert all(map(torch.equal, *grown))
            width = rng.randrange(9)
            verified, _ = select_nodes(grown[0], grown[0].num_nodes.clamp(max=width), width)
            committed = committed_of(rng, rows, verified)
            for drafter in drafters:
                drafter.commit(committed)
    one, other = (drafter._memory for drafter in drafters)
    assert torch.equal(one.entries, other.entries)
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.tails[:4], other.tails[:4])
    assert drafters[0].credits() == drafters[1].credits()
    assert sum(drafters[0].credits().values())
    assert drafters[0].memory_counts() == drafters[1].memory_counts()


def committed_of(rng: random.Random, rows: Tensor, tree: DraftTree) -> Committed:
    """The target takes the first node of each tree that has one, and chooses a token after it."""
    choices = torch.tensor([[rng.randrange(6) for _ in range(tree.width + 1)] for _ in rows])
    counts = 1 + (tree.num_nodes > 0).long()
    tokens = torch.full((len(rows), 2), -1)
    for line, count in enumerate(counts.tolist()):
        if count > 1:
            choices[line, 0] = tree.tokens[line, 0]
        tokens[line, :count] = choices[line, :count]
    path = torch.where(counts[:, None] > 1, 0, -1)
    result = VerifyResult(path, counts - 1, choices)
    return Committed(rows, tokens[:, : 1 + min(tree.width, 1)], counts, tree, result, None, counts, tokens)
