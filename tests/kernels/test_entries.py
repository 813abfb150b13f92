"""Entries of texts, compiled as by the reference: after any history the tables are equal, and so is what they give."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import ops
from kernels.entries import CommittedTokens, DraftLabels, EntryTables, FirstBlocks, Recordings
from kernels.ops import REFERENCE

KINDS = (REFERENCE, ops.on(torch.device("cpu")))
ROWS, POSITIONS, ROOM, SLOTS, WIDTH = 17, 60, 12, 200, 3


def tables(entries: int, dtype: torch.dtype) -> EntryTables:
    known, ends, waiting = torch.zeros(3, ROWS, dtype=torch.int64)
    places = torch.zeros(ROWS, POSITIONS + 1, entries, dtype=torch.int64)
    features = torch.zeros(ROWS, ROOM + 1, WIDTH, dtype=dtype)
    tokens = torch.zeros(ROWS, ROOM + 1, dtype=torch.int64)
    return EntryTables(places, known, ends, waiting, features, tokens, torch.zeros(SLOTS, dtype=torch.bool))


def assert_equal(*both: EntryTables) -> None:
    """But for the columns that take padding."""
    for name in ("known", "ends", "waiting", "held"):
        assert torch.equal(*(getattr(one, name) for one in both)), name
    for name in ("places", "features", "tokens"):
        assert torch.equal(*(getattr(one, name)[:, :-1] for one in both)), name


@given(
    seed=st.integers(0, 2**30),
    batch=st.integers(1, 16),
    entries=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_texts_are_followed_alike(seed: int, batch: int, entries: int, dtype: torch.dtype) -> None:
    drawn, both = torch.Generator().manual_seed(seed), [tables(entries, dtype) for _ in KINDS]
    ends, size = torch.zeros(ROWS, dtype=torch.int64), entries + 1
    scratch = (SLOTS * entries + torch.arange(ROWS * 5).view(ROWS, 5))[:, 1 : 1 + size - entries]
    for step in range(5):
        rows = torch.randperm(ROWS, generator=drawn)[:batch]
        counts = torch.randint(0, 4, (batch,), generator=drawn)
        jumps = torch.randint(0, 5, (batch,), generator=drawn) == 0  # a text that goes on elsewhere
        starts, count = ends[rows] + jumps, max(1, int(counts.max()))
        ends[rows] = starts + counts
        slots, tokens = torch.randint(1, SLOTS, (2, batch, count), generator=drawn)
        features = torch.randn(batch, count, WIDTH, generator=drawn)
        queued = (features, tokens) if step != 2 else (None, None)
        for kind, own in zip(KINDS, both, strict=True):
            kind.add_entries(own, rows, starts, counts, slots, *queued)
        assert_equal(*both)
        if step % 2:
            most = max(1, int(both[0].waiting[rows].max()))
            expected, taken = (kind.take_entries(own, rows, most) for kind, own in zip(KINDS, both, strict=True))
            assert all(map(torch.equal, taken, expected))
            assert_equal(*both)
            for block, places in ((0, scratch[:batch, :0]), (size, scratch[:batch])):
                given_there = rows, taken.positions, taken.slots, places, block
                wanted, found = (kind.place_entries(own, *given_there) for kind, own in zip(KINDS, both, strict=True))
                assert all(map(torch.equal, found, wanted))


def recordings(dtype: torch.dtype, top: int) -> Recordings:
    def table(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(ROWS, ROOM, *shape, dtype=dtype)

    numbers, floats = table(dtype=torch.int64), table(dtype=torch.float32)
    tops = table(top, dtype=torch.int32), table(top, dtype=torch.float32)
    labels = DraftLabels(numbers, table(5), numbers.clone(), floats, table(dtype=torch.bool), *tops)
    return Recordings(torch.arange(ROWS) % 3 > 0, table(WIDTH), labels, numbers, floats)


@given(
    seed=st.integers(0, 2**30),
    batch=st.integers(1, 16),
    vocab=st.sampled_from([20, 1000]),
    top=st.sampled_from([1, 7, 20]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    grown=st.booleans(),
)
def test_tokens_are_recorded_alike(
    seed: int, batch: int, vocab: int, top: int, dtype: torch.dtype, grown: bool
) -> None:
    drawn, both = torch.Generator().manual_seed(seed), [recordings(dtype, top) for _ in KINDS]
    count, size = 6, 4
    t2d = torch.randint(-1, vocab // 2, (vocab,), generator=drawn)
    states, block = (torch.randn(ROWS, size, wide, generator=drawn).to(dtype) for wide in (5, vocab // 2))
    blocks = FirstBlocks(torch.randint(0, 2, (ROWS,), generator=drawn), states, block, t2d)
    rows = torch.randperm(ROWS, generator=drawn)[:batch]
    roots, num_nodes = torch.randint(0, 2, (2, batch), generator=drawn)
    tokens = torch.randint(0, vocab, (batch, count), generator=drawn)
    # No two scores of a row are equal, so that there is one order.
    logits = torch.stack([torch.randperm(vocab, generator=drawn) for _ in range(batch * count)]).float() / 8
    counts, chosen_by = torch.randint(1, count + 1, (batch,), generator=drawn), torch.randperm(batch * count)
    features = torch.randn(batch, count, WIDTH, generator=drawn).to(dtype)
    given = rows, roots, counts, num_nodes, tokens, features, logits.to(dtype)
    of = CommittedTokens(*given, chosen_by.view(batch, count))
    for kind, own in zip(KINDS, both, strict=True):
        kind.record_tokens(own, blocks if grown else None, of)
    (_, seen, expected, *_), (_, found_seen, found, *_) = both
    assert torch.equal(found_seen, seen)
    for name in ("positions", "tokens", "rejected"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(found.states[found.positions > 0], expected.states[found.positions > 0])
    assert torch.allclose(found.chances, expected.chances, rtol=1e-4)
    assert torch.allclose(found.top_logprobs, expected.top_logprobs, atol=1e-4)
    if dtype == torch.float32:  # bfloat16 makes some scores equal
        assert torch.equal(found.top_ids, expected.top_ids)
