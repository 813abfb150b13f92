"""Every processor against a one-row implementation with Python lists, and rows against their company."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.sample import ChosenTokens, gumbel_noise_of
from service.engine.requests import SamplingParams
from service.engine.sampling import SamplingRows, SamplingState, SamplingTable, logprobs
from tests.service.engine.harness import choose_tokens, state_after

VOCAB = 12
EOS = frozenset({2})
CPU = torch.device("cpu")
INF = float("inf")


@dataclass(frozen=True)
class Row:
    """One row and its sequence, as the oracle sees them."""

    logits: list[float]
    params: SamplingParams
    prompt: list[int]
    generated: list[int]
    path: list[int]

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.generated) + len(self.path)


def _params(seed: int = 11, **changes: object) -> SamplingParams:
    return replace(SamplingParams(seed=seed, max_tokens=100), **changes)  # type: ignore[arg-type]


def _choose(rows: Sequence[Row], dtype: torch.dtype = torch.float32) -> ChosenTokens:
    """All rows in one step, each with a sequence of its own."""
    vocab = len(rows[0].logits)
    states = [state_after(r.params, r.prompt, r.generated, eos_ids=EOS, vocab=vocab) for r in rows]
    depth = max(len(r.path) for r in rows)
    return choose_tokens(
        torch.tensor([r.logits for r in rows], dtype=dtype),
        SamplingRows(
            SamplingTable.build(states),
            torch.arange(len(rows)),
            torch.tensor([r.position for r in rows]),
            torch.tensor([len(r.generated) + len(r.path) for r in rows]),
            torch.tensor([r.path + [-1] * (depth - len(r.path)) for r in rows], dtype=torch.int64).view(len(rows), -1),
        ),
    )


def _select(rows: SamplingRows, idx: Tensor) -> SamplingRows:
    """The rows of these indices."""
    parts = (rows.sequence_idx, rows.positions, rows.num_generated, rows.path_tokens)
    return SamplingRows(rows.table, *(part[idx] for part in parts))


def _oracle(row: Row) -> int:
    """The same token, one number at a time."""
    f32, p = np.float32, row.params
    z = [f32(x) for x in row.logits]
    for token, bias in p.logit_bias:
        z[token] = f32(z[token] + f32(bias))
    written = row.generated + row.path
    if len(written) < p.min_tokens:
        for token in EOS | p.stop_token_ids:
            z[token] = f32(-INF)
    for token in range(len(z)):
        if token in row.prompt + written:
            repetition = f32(p.repetition_penalty)
            z[token] = f32(z[token] / repetition if z[token] > 0 else z[token] * repetition)
        z[token] = f32(z[token] - f32(f32(written.count(token)) * f32(p.frequency_penalty)))
        z[token] = f32(z[token] - f32(p.presence_penalty if token in written else 0.0))
    if p.temperature == 0:
        return z.index(max(z))
    z = [f32(f32(x - max(z)) / f32(p.temperature)) for x in z]
    ranking = sorted((t for t in range(len(z))), key=lambda t: (-z[t], t))
    if p.min_p > 0:
        assume(all(abs(math.exp(x) - p.min_p) > 1e-6 for x in z))
        ranking = [t for t in ranking if math.exp(z[t]) >= p.min_p]
    if p.top_k > 0:
        ranking = ranking[: p.top_k]
    if p.top_p < 1:
        ranking = _nucleus(ranking, [math.exp(z[t]) for t in ranking], p.top_p)
    seed = (p.seed + 2**63) % 2**64 - 2**63
    noise = gumbel_noise_of(torch.tensor([seed]), torch.tensor([row.position]), torch.arange(len(z)))[0].numpy()
    return max(sorted(ranking), key=lambda t: f32(z[t] + noise[t]))


def _nucleus(ranking: list[int], weights: list[float], top_p: float) -> list[int]:
    total = sum(weights)
    before = [sum(weights[:i]) for i in range(len(weights))]
    assume(all(abs(b - top_p * total) > 1e-6 * total for b in before[1:]))
    return [token for token, b in zip(ranking, before, strict=True) if b == 0 or b < top_p * total]


tokens = st.integers(0, VOCAB - 1)
halves = st.integers(-8, 8).map(lambda i: i / 2)  # many ties
params = st.builds(
    SamplingParams,
    seed=st.integers(-(2**63), 2**64 - 1),
    max_tokens=st.just(50),
    min_tokens=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.01, 0.5, 0.7, 1.0, 1.0, 1.5, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.8, 0.5, 0.1, 0.0]),
    top_k=st.sampled_from([0, 0, -1, 1, 2, 5, 11, 12, 500]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 0.9]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -0.4, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-INF, -100.0, -1.25, 0.3, 3.0]), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
    stop_token_ids=st.frozensets(tokens, max_size=3),
)
rows = st.builds(
    Row,
    logits=st.lists(halves, min_size=VOCAB, max_size=VOCAB),
    params=params,
    prompt=st.lists(tokens, min_size=1, max_size=6),
    generated=st.lists(tokens, max_size=5),
    path=st.lists(tokens, max_size=4),
)


def _has_choice(row: Row) -> bool:
    """Not every token is forbidden."""
    banned = {token for token, bias in row.params.logit_bias if bias == -INF}
    if len(row.generated) + len(row.path) < row.params.min_tokens:
        banned |= EOS | row.params.stop_token_ids
    return len(banned) < VOCAB


@settings(max_examples=400)
@given(st.lists(rows.filter(_has_choice), min_size=1, max_size=5))
def test_equals_the_oracle(batch: list[Row]) -> None:
    choice = _choose(batch)
    assert not choice.bad_rows.any()
    assert choice.tokens.tolist() == [_oracle(row) for row in batch]


def test_a_table_built_before_a_commit_sees_it() -> None:
    state = SamplingState(_params(temperature=0.0, presence_penalty=2.0), [1], eos_ids=EOS, vocab=VOCAB, device=CPU)
    table = SamplingTable.build([state])
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.5, 1.0
    row = SamplingRows(table, *(torch.zeros(1, dtype=torch.int64),) * 3, torch.zeros(1, 0, dtype=torch.int64))
    assert choose_tokens(logits, row).tokens.tolist() == [7]
    state.extend([7])
    assert choose_tokens(logits, row).tokens.tolist() == [8]


MANY_PARAMS = (
    _params(temperature=0.0),
    _params(temperature=1.0, seed=5),
    _params(temperature=0.7, top_p=0.9, seed=2**64 - 1),
    _params(temperature=1.5, top_k=40, min_p=0.01),
    _params(temperature=0.8, top_p=0.3, repetition_penalty=1.2, logit_bias=((3, 5.0), (0, -INF)), seed=-3),
    _params(temperature=0.0, frequency_penalty=0.5, min_tokens=9, stop_token_ids=frozenset({0, 1})),
)


@pytest.mark.parametrize("vocab", [1003, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_alone_are_rows_in_company_in_any_order(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    states = [state_after(p, range(40), range(30, 50), eos_ids=EOS, vocab=vocab) for p in MANY_PARAMS]
    table = SamplingTable.build(states)
    num_rows = 30
    logits = (torch.randn(num_rows, vocab, generator=generator) * 3).to(dtype)
    depths = torch.arange(num_rows) % 4
    path = torch.randint(0, vocab, (num_rows, 3), generator=generator)
    together = SamplingRows(
        table,
        torch.arange(num_rows) % len(states),
        60 + depths,
        20 + depths,
        path.masked_fill(torch.arange(3) >= depths[:, None], -1),
    )
    expected = choose_tokens(logits, together).tokens
    order = torch.randperm(num_rows, generator=generator)
    assert torch.equal(choose_tokens(logits[order], _select(together, order)).tokens, expected[order])
    for i in range(num_rows):
        alone = torch.tensor([i])
        own = SamplingTable.build([states[i % len(states)]])
        row = replace(_select(together, alone), table=own, sequence_idx=torch.tensor([0]))
        assert choose_tokens(logits[alone], row).tokens.tolist() == [expected[i].item()]
        assert choose_tokens(logits[alone], _select(together, alone)).tokens.tolist() == [expected[i].item()]


def test_greedy_without_processors_is_plain_and_takes_the_lowest_id() -> None:
    plain = [SamplingState(_params(temperature=0.0, top_p=0.5, top_k=3), [1], eos_ids=EOS, vocab=4, device=CPU)] * 2
    assert SamplingTable.build(plain) == SamplingTable()
    assert SamplingTable.build([]) == SamplingTable(), "a step of prompt chunks may complete no one"
    row = Row([1.0, 5.0, 5.0, 5.0], _params(temperature=0.0), [1], [], [])
    assert _choose([row, replace(row, logits=[2.0] * 4)], torch.bfloat16).tokens.tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = [30.0, 29.0, 31.0, 28.0]
    batch = [Row(logits, _params(temperature=temperature, seed=s), [1], [], []) for s in range(50)]
    choice = _choose(batch)
    assert choice.tokens.tolist() == [2] * 50
    assert not choice.bad_rows.any()


@pytest.mark.parametrize("changes", MANY_PARAMS, ids=lambda p: f"T={p.temperature},{p.top_p},{p.top_k}")
def test_a_bad_row_is_flagged_and_disturbs_no_one(changes: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(3)
    good = [Row(torch.randn(VOCAB, generator=generator).tolist(), changes, [1], [4], [6]) for _ in range(4)]
    broken = (
        [math.nan] * VOCAB,
        [0.0] * 5 + [math.nan] + [0.0] * (VOCAB - 6),
        [-INF] * VOCAB,
        [0.0] * 5 + [INF] + [0.0] * (VOCAB - 6),
    )
    expected = _choose(good).tokens.tolist()
    for values in broken:
        choice = _choose([good[0], replace(good[1], logits=values), *good[1:]])
        assert choice.bad_rows.tolist() == [False, True, False, False, False]
        assert choice.tokens.tolist() == [expected[0], 0, *expected[1:]]


def test_min_tokens_counts_the_path_and_forgets_ids_beyond_the_vocabulary() -> None:
    wait = _params(temperature=0.0, min_tokens=3, stop_token_ids=frozenset({5, VOCAB + 7}))
    logits = [0.0] * VOCAB
    logits[2], logits[5], logits[7] = 9.0, 8.0, 7.0
    texts: list[tuple[list[int], list[int]]] = [([], []), ([1], [1]), ([1, 1], [1]), ([1, 1, 1], [])]
    batch = [Row(logits, wait, [1], generated, path) for generated, path in texts]
    assert _choose(batch).tokens.tolist() == [7, 7, 2, 2]


def test_logits_are_left_as_they_are() -> None:
    logits = torch.randn(len(MANY_PARAMS), VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    states = [state_after(p, [1, 2], [3], eos_ids=EOS, vocab=VOCAB) for p in MANY_PARAMS]
    place = torch.arange(len(states))
    choose_tokens(
        logits, SamplingRows(SamplingTable.build(states), place, place, place, torch.full((len(states), 2), -1))
    )
    assert torch.equal(logits, before)


@given(st.lists(halves, min_size=VOCAB, max_size=VOCAB), tokens, st.integers(0, VOCAB))
def test_logprobs(logits: list[float], token: int, k: int) -> None:
    ranking = sorted(range(VOCAB), key=lambda t: (-logits[t], t))
    log_total = math.log(sum(map(math.exp, logits)))
    (result,) = logprobs(torch.tensor([logits]), [token], k)
    assert result.rank == 1 + sum(x > logits[token] for x in logits)
    assert [top_id for top_id, _ in result.top] == ranking[:k]
    assert result.logprob == pytest.approx(logits[token] - log_total, abs=1e-5)
    found = [logprob for _, logprob in result.top]
    assert found == pytest.approx([logits[t] - log_total for t in ranking[:k]], abs=1e-5)


@pytest.mark.parametrize("vocab", [1003, 49152])
def test_logprobs_alone_are_logprobs_in_company(vocab: int) -> None:
    logits = (torch.randn(7, vocab, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    chosen = [31 * row for row in range(7)]
    alone = [next(logprobs(logits[row : row + 1], [token], 20)) for row, token in enumerate(chosen)]
    assert alone == list(logprobs(logits, chosen, 20))
