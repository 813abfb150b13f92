"""What the memory tells of itself: what it remembers, what it had seen, how full it is, and whose answers went."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafters.memory.drafter import MemoryDrafter
from drafters.memory_counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, DraftingSizes, HostMetadata, MemorySizes, Noise
from drafters.readback import Readback
from drafters.tree import VerifyResult
from kernels.memory import past_lines
from kernels.trees import DraftTree, select_nodes
from tests.kernels.tensor_program import kernels, record
from tests.random_tree import RandomTreeDrafter

KIB = 1024


def drafter_of(num_bytes: int = 64 * KIB, owners: int = 1, scopes: int = 1) -> MemoryDrafter:
    memory = MemorySizes(num_bytes=num_bytes, owners=owners, scopes=scopes)
    return MemoryDrafter(DraftingSizes(max_sequences=2, max_length=64, max_nodes=8, memory=memory))


def answer(drafter: MemoryDrafter, *tokens: int, scope: str = "owner", store: bool = True, steps: int = 1) -> None:
    """The same step so often, of a text that begins with token 1."""
    drafter.start([DraftContext(0, [1], scope=scope, store=store)])
    spoken = torch.tensor([tokens])
    length = torch.tensor([len(tokens) - 1])
    result = VerifyResult(spoken[:, 1:], length, spoken)
    one = torch.zeros(1, dtype=torch.int64)
    for _ in range(steps):
        drafter.commit(
            Committed(one, spoken, length + 1, DraftTree.empty(1), result, None, one, torch.zeros_like(spoken))
        )
    drafter.finish([0])


def test_tokens_remembered_and_known_are_counted() -> None:
    drafter = drafter_of()
    assert drafter.memory_counts() == MemoryCounts(reserved_bytes=64 * KIB, known_tokens=(0, 0, 0, 0))
    answer(drafter, 2, 3, 4, 5, 6)
    counts = drafter.memory_counts()
    assert (counts.remembered_tokens, counts.known_tokens) == (5, (0, 0, 0, 0))
    answer(drafter, 2, 3, 4, 5, 6)
    counts = drafter.memory_counts()
    assert (counts.remembered_tokens, counts.known_tokens) == (10, (1, 2, 2, 0))
    answer(drafter, 2, 3, store=False)
    counts = drafter.memory_counts()
    assert (counts.remembered_tokens, counts.known_tokens) == (10, (2, 3, 2, 0))


def test_places_in_use_are_those_of_past_answers() -> None:
    """Of a memory of no more buckets than are sampled all are seen; the texts' own places are not counted."""
    drafter = drafter_of()
    answer(drafter, 2, 3, 4, 5, 6)
    assert drafter.memory_counts().used_share == (5 + 4 + 2) / (64 * KIB / 8), "behind 1, 2 and 4 tokens"
    answer(drafter, 7, store=False, steps=64)
    assert drafter.memory_counts().used_share == (5 + 4 + 2) / (64 * KIB / 8)


@pytest.mark.parametrize("num_bytes", [192 * KIB, 4096 * KIB])
def test_a_sample_of_a_large_memory_is_close(num_bytes: int) -> None:
    drafter = drafter_of(num_bytes, owners=3)
    generator = torch.Generator().manual_seed(1)
    for owner in range(3):
        tokens = torch.randint(2, 1000, (num_bytes // 150,), generator=generator).tolist()
        answer(drafter, *tokens, scope=str(owner))
    answer(drafter, 7, store=False, steps=64)
    counts = drafter.memory_counts()
    used = (drafter._memory.entries[: counts.reserved_bytes // 64] != 0).double().mean()
    assert 0.3 < used < 0.9
    assert counts.used_share == pytest.approx(float(used), abs=3 / 64)


def test_evicted_scopes_and_forgotten_shares_are_counted() -> None:
    drafter = drafter_of(owners=1, scopes=2)
    for scope in ("owner/a", "owner/b", "owner/c", "owner/a"):
        answer(drafter, 2, 3, scope=scope)
    assert drafter.memory_counts().evicted_scopes == 2
    drafter.forget("owner/b")
    assert drafter.memory_counts().forgotten_shares == 0, "it was evicted"
    drafter.forget()
    assert drafter.memory_counts().forgotten_shares == 2


def test_without_room_nothing_is_remembered() -> None:
    drafter = drafter_of(0)
    answer(drafter, 2, 3, steps=64)
    assert drafter.memory_counts() == MemoryCounts(reserved_bytes=0, known_tokens=(0, 0, 0, 0))


def test_counts_come_with_what_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafters.readback.readback_of", lambda device: Readback(late=True))
    drafter = drafter_of()
    answer(drafter, 2, 3)
    assert drafter.memory_counts().remembered_tokens == 0
    answer(drafter, 2, 3)
    assert drafter.memory_counts().remembered_tokens == 2
    assert drafter.memory_counts().used_share > 0


# The memory's calls as captures: padded batches change nothing.


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


def test_a_suspended_memory_counts_the_same_tokens_later() -> None:
    """In batches, and before the memory is read or a scope is forgotten; of two texts of one scope, too."""
    steps, generator = 150, random.Random(4)
    spoken = [[generator.randint(2, 6) for _ in range(steps)] for _ in range(2)]
    kept, counts = [], []
    for follow in (True, False):
        drafter = drafter_of()
        texts = [[1, 2], [1, 3]]
        drafter.start([DraftContext(row, text, scope="owner", store=True) for row, text in enumerate(texts)])
        rows = torch.arange(2)
        for step in range(steps):
            new = torch.tensor([[one[step]] for one in spoken])
            host = HostMetadata((0, 1), tuple(len(text) - 1 for text in texts))
            result = VerifyResult(new[:, 1:], torch.zeros_like(rows), new)
            drafter.commit(
                Committed(rows, new, torch.ones_like(rows), DraftTree.empty(2), result, None, rows, new, follow, host)
            )
            for text, one in zip(texts, spoken, strict=True):
                text.append(one[step])
        drafter.grow(rows, Noise.of_text(0, 0.0, rows))
        counts.append(drafter.memory_counts())
        drafter.finish([0, 1])
        assert drafter.memory_counts() == counts[-1]
        kept.append(drafter._memory.tails)
    assert torch.equal(*kept)
    assert counts[0].remembered_tokens == counts[1].remembered_tokens == 2 * steps


class Recording(RandomTreeDrafter):
    """A network whose recorder wants every sequence."""

    wants_scores = True

    def __init__(self, sizes: DraftingSizes) -> None:
        super().__init__(sizes)
        self.past: list[Tensor] = []
        self.regression: Tensor | None = None

    def start(self, contexts: Sequence[DraftContext]) -> None:
        assert contexts[0].regression is not None
        self.regression = contexts[0].regression()

    def commit(self, committed: Committed) -> None:
        assert committed.past is not None
        self.past.append(committed.past)


def test_a_suspended_memory_that_is_recorded_counts_at_once() -> None:
    """What past answers knew of a token is read before it is counted, in every step."""
    sizes = DraftingSizes(max_sequences=1, max_length=64, max_nodes=8, memory=MemorySizes(num_bytes=64 * KIB))
    network = Recording(sizes)
    drafter, rows, text = MemoryDrafter(sizes, network), torch.tensor([0]), [1]
    drafter.start([DraftContext(0, text, scope="owner", store=True)])
    (share,) = drafter.past.by_scope()
    assert network.regression is not None
    assert torch.equal(network.regression, torch.stack([share.weights, share.squares]))
    result = VerifyResult(rows[:, None][:, 1:], torch.zeros_like(rows), rows[:, None])
    for step, token in enumerate([2, 3, 2, 3, 2]):
        new, host = torch.tensor([[token]]), HostMetadata((0,), (step,))
        expected = past_lines(drafter._memory, rows, new)
        drafter.commit(
            Committed(rows, new, torch.ones_like(rows), DraftTree.empty(1), result, None, rows + step, new, False, host)
        )
        assert torch.equal(network.past[-1], expected)
        assert drafter.memory_counts().remembered_tokens == step + 1
        text.append(token)
    assert [bool(lines.any()) for lines in network.past] == [False, False, False, True, True]
