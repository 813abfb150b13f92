"""The law of the sampler: 100,000 draws of each case against its exact distribution, by a G-test.

The same for the tokens that a walk over draft trees accepts, whatever the drafter proposes; and samplers that are
wrong on purpose, to show that the test would notice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sample import gumbel_noise_of
from kernels.settle import accept
from service.engine.requests import SamplingParams
from service.engine.sampling import SamplingRows, SamplingTable
from tests import p_values
from tests.service.engine.harness import choose_tokens, state_after

ROUNDED = pytest.mark.slow("the same sampler, of rounded logits", covers="service/engine/sampling.py kernels")
DRAWS = 100_000
SEEDS = (1, 2**63 + 5, -17, 987_654_321)
ALPHA = 1e-6 / 100  # over fewer than a hundred tests, one false alarm in a million runs
EOS = frozenset({0})
PROMPT = (1, 1, 0)
CPU = torch.device("cpu")
INF = float("inf")
Law = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """Logits, how they are sampled, and the text before."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    generated: tuple[int, ...] = ()
    path: tuple[int, ...] = ()

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(
            seed=seed,
            max_tokens=9,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            repetition_penalty=self.repetition,
            logit_bias=self.bias,
        )

    def law(self, logits: Sequence[float], path: Sequence[int]) -> Law:
        """The exact distribution, from the definitions and by sorting."""
        written = [*self.generated, *path]
        z = np.array(logits, dtype=np.float64)
        for token, value in self.bias:
            z[token] += value
        if len(written) < self.min_tokens:
            z[list(EOS)] = -INF
        for token in {*PROMPT, *written}:
            z[token] *= 1 / self.repetition if z[token] > 0 else self.repetition
            z[token] -= self.frequency * written.count(token) + self.presence * (token in written)
        weights = np.exp((z - z.max()) / self.temperature)
        ranking = sorted(range(len(z)), key=lambda t: (-z[t], t))
        ranking = [t for t in ranking if weights[t] >= self.min_p][: self.top_k or None]
        share = np.cumsum(weights[ranking]) / weights[ranking].sum()
        kept = [t for i, t in enumerate(ranking) if i == 0 or share[i - 1] < self.top_p]
        law = np.zeros(len(z))
        law[kept] = weights[kept] / weights[kept].sum()
        return law


SKEWED = (2.0, 1.0, 0.5, 0.0, -1.0, -3.0)
FLAT = (0.0,) * 8
TEXT = (2, 3, 3)

CASES = {
    "two equal": Case((0.0, 0.0)),
    "eight equal": Case(FLAT),
    "skewed": Case(SKEWED),
    "skewed, T=0.5": Case(SKEWED, temperature=0.5),
    "skewed, T=0.7": Case(SKEWED, temperature=0.7),
    "skewed, T=2": Case(SKEWED, temperature=2.0),
    "large common offset": Case(tuple(z + 60 for z in SKEWED)),
    "one token holds nearly all": Case((9.0, 0.0, 0.0, -1.0)),
    "zero mass in the logits": Case((1.0, -INF, 0.5, -INF, 0.0)),
    "zero mass by bias": Case(SKEWED, bias=((0, -INF), (3, -INF))),
    "all but one banned": Case((5.0, 5.0, -5.0), bias=((0, -INF), (1, -INF))),
    "bias up and down": Case(SKEWED, bias=((0, -2.5), (4, 3.0), (5, 0.75))),
    "zero mass by top-k": Case(SKEWED, top_k=3),
    "top-k of one": Case(SKEWED, top_k=1),
    "top-k with ties across the border": Case((1.0, 0.0, 0.0, 0.0, 2.0), top_k=3, temperature=1.5),
    "zero mass by min-p": Case(SKEWED, min_p=0.2),
    "min-p of 1 keeps ties": Case((3.0, 1.0, 3.0, 3.0), min_p=1.0),
    "top-p exactly between two of four": Case((0.0,) * 4, top_p=0.5),
    "top-p exactly between three of four": Case((0.0,) * 4, top_p=0.75),
    "top-p just past two of eight": Case(FLAT, top_p=0.2501),
    "top-p border among ties below a peak": Case((2.0, 0.0, 0.0, 0.0), top_p=0.8),
    "top-p after top-k": Case(SKEWED, top_k=4, top_p=0.9),
    "top-p after min-p, T=2": Case(SKEWED, min_p=0.1, top_p=0.7, temperature=2.0),
    "top-p of 0": Case(SKEWED, top_p=0.0),
    "repetition penalty": Case(SKEWED, repetition=1.6, generated=TEXT),
    "repetition reward": Case(SKEWED, repetition=0.6, generated=TEXT),
    "frequency and presence": Case(SKEWED, frequency=0.5, presence=0.4, generated=TEXT),
    "presence reward": Case(SKEWED, presence=-1.5, generated=TEXT),
    "penalties on the path": Case(SKEWED, frequency=0.5, repetition=1.3, generated=TEXT, path=(3, 0)),
    "end forbidden at first": Case(SKEWED, min_tokens=4, generated=TEXT),
    "end allowed by the path": Case(SKEWED, min_tokens=4, generated=TEXT, path=(5,)),
    "sixty-four tokens": Case(tuple(-1.1 * math.log(i + 1) for i in range(64))),
    "everything at once": Case(
        SKEWED,
        temperature=0.8,
        top_p=0.95,
        top_k=5,
        min_p=0.01,
        presence=0.3,
        frequency=0.2,
        repetition=1.1,
        bias=((5, 4.0),),
        generated=TEXT,
        path=(1,),
    ),
}


def _p_value(counts: NDArray[np.int64], law: Law) -> float:
    """G-test; what has no mass must not occur, and thinly populated cells are pooled."""
    assert counts[law == 0].sum() == 0
    expected, observed = law[law > 0] * counts.sum(), counts[law > 0]
    thin = expected < 10
    if thin.any():
        expected = np.append(expected[~thin], expected[thin].sum())
        observed = np.append(observed[~thin], observed[thin].sum())
    if len(expected) == 1:
        return 1.0
    seen = observed > 0
    statistic = 2.0 * float((observed[seen] * np.log(observed[seen] / expected[seen])).sum())
    return p_values.of_chi_square(statistic, len(expected) - 1)


def _table(case: Case, seeds: Sequence[int], vocab: int) -> SamplingTable:
    return SamplingTable.build(
        [state_after(case.params(seed), PROMPT, case.generated, eos_ids=EOS, vocab=vocab) for seed in seeds]
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=ROUNDED)], ids=["fp32", "bf16"])
def test_draws_follow_the_law(case: Case, dtype: torch.dtype) -> None:
    logits = torch.tensor(case.logits, dtype=dtype)
    per_seed = DRAWS // len(SEEDS)
    rows = SamplingRows(
        _table(case, SEEDS, len(logits)),
        torch.arange(len(SEEDS)).repeat_interleave(per_seed),
        torch.arange(per_seed).repeat(len(SEEDS)),
        torch.full((DRAWS,), len(case.generated) + len(case.path)),
        torch.tensor(case.path, dtype=torch.int64).expand(DRAWS, -1),
    )
    choice = choose_tokens(logits.expand(DRAWS, -1), rows)
    assert not choice.bad_rows.any()
    counts = torch.bincount(choice.tokens, minlength=len(logits)).numpy()
    assert _p_value(counts, case.law(logits.tolist(), case.path)) > ALPHA


# Trees: three children of the root, and children below two of them.
PARENTS = torch.tensor([-1, -1, -1, 0, 0, 1])
NODES = len(PARENTS)
VOCAB = 5
NEXT_LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4)) * 1.2  # row: the token before
FIRST = 2  # the token at the root
STRIDE = 2  # positions are taken in pairs, so that no two trees share one

Draft = Callable[[Tensor], Tensor]  # positions of the roots' children [batch] -> tokens [batch, NODES]


def _random(positions: Tensor) -> Tensor:
    return torch.randint(0, VOCAB, (len(positions), NODES), generator=torch.Generator().manual_seed(9))


def _coupled(positions: Tensor) -> Tensor:
    """Ranks by the noise the target will use, and knows nothing else: as far from independent as a drafter can be."""
    seeds = torch.full_like(positions, SEEDS[0])
    first = gumbel_noise_of(seeds, positions, torch.arange(VOCAB)).topk(3).indices
    second = gumbel_noise_of(seeds, positions + 1, torch.arange(VOCAB)).topk(2).indices
    return torch.cat((first, second, second[:, :1]), 1)


def _coupled_upside_down(positions: Tensor) -> Tensor:
    seeds = torch.full_like(positions, SEEDS[0])
    first = (-gumbel_noise_of(seeds, positions, torch.arange(VOCAB))).topk(3).indices
    return torch.cat((first, first), 1)


def _disjoint(positions: Tensor) -> Tensor:
    """Only tokens that have no mass in the cases below that ban 3 and 4."""
    return torch.tensor([3, 4, 3, 4, 3, 3]).expand(len(positions), -1)


DRAFTS: dict[str, Draft] = {
    "random": _random,
    "coupled": _coupled,
    "coupled upside down": _coupled_upside_down,
    "disjoint": _disjoint,
}
TREE_CASES = {
    "T=1": Case(()),
    "T=0.6 with top-k": Case((), temperature=0.6, top_k=3),
    "3 and 4 banned": Case((), bias=((3, -INF), (4, -INF))),
    "penalties along the path": Case((), frequency=1.5, presence=0.5, repetition=1.4, generated=(2,)),
    "top-p, T=1.5": Case((), temperature=1.5, top_p=0.8),
}


def _choose(case: Case, table: SamplingTable, before: Tensor, positions: Tensor, path: Tensor) -> Tensor:
    """Target tokens after the tokens `before`, at these positions. # all [rows]; path [rows, depth]"""
    num_generated = len(case.generated) + (path >= 0).sum(1)
    rows = SamplingRows(table, torch.zeros_like(positions), positions, num_generated, path)
    return choose_tokens(NEXT_LOGITS[before], rows).tokens


def _two_tokens(case: Case, draft: Draft, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first two tokens emitted by tree speculation, and the accepted lengths. # each [batch]"""
    table = _table(case, SEEDS[:1], VOCAB)
    positions = torch.arange(batch) * STRIDE + len(PROMPT)
    tokens = draft(positions)
    parent_tokens = torch.where(PARENTS >= 0, tokens[:, PARENTS], -1)
    first_on_path = torch.where(PARENTS >= 0, parent_tokens, tokens)
    second_on_path = torch.where(PARENTS >= 0, tokens, -1)
    root = torch.full((batch, 1), -1)
    path = torch.stack((torch.cat((root, first_on_path), 1), torch.cat((root, second_on_path), 1)), -1)
    before = torch.cat((torch.full((batch, 1), FIRST), tokens), 1)  # [batch, NODES + 1]
    depths = (path >= 0).sum(-1)
    targets = _choose(case, table, before.flatten(), (positions[:, None] + depths).flatten(), path.flatten(0, 1)).view(
        batch, -1
    )
    accepted = accept(tokens, PARENTS.expand(batch, -1), torch.full((batch,), NODES), targets)
    emitted = torch.cat((tokens.gather(1, accepted.path.clamp(min=0)), accepted.bonus[:, None]), 1)
    is_bonus = accepted.num_accepted[:, None] == torch.arange(emitted.shape[1])
    emitted = torch.where(is_bonus, accepted.bonus[:, None], emitted)
    # where nothing was accepted, the second token comes from the next step
    lone = accepted.num_accepted == 0
    emitted[lone, 1] = _choose(case, table, emitted[lone, 0], positions[lone] + 1, emitted[lone, :1])
    return emitted[:, 0], emitted[:, 1], accepted.num_accepted


def _joint_law(case: Case) -> Law:
    first = case.law(NEXT_LOGITS[FIRST].tolist(), ())
    return np.stack([first[t] * case.law(NEXT_LOGITS[t].tolist(), (t,)) for t in range(VOCAB)]).flatten()


def _joint_counts(first: Tensor, second: Tensor) -> NDArray[np.int64]:
    return torch.bincount(first * VOCAB + second, minlength=VOCAB**2).numpy()


@pytest.mark.parametrize("case", TREE_CASES.values(), ids=TREE_CASES.keys())
@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS.keys())
def test_accepted_tokens_follow_the_joint_law(case: Case, draft: Draft) -> None:
    first, second, _ = _two_tokens(case, draft, DRAWS)
    assert _p_value(_joint_counts(first, second), _joint_law(case)) > ALPHA


def test_a_disjoint_drafter_has_nothing_accepted_and_a_coupled_one_more_than_chance() -> None:
    banned = TREE_CASES["3 and 4 banned"]
    assert not _two_tokens(banned, _disjoint, 5_000)[2].any()
    accepted = {draft: _two_tokens(Case(()), draft, 5_000)[2].double().mean() for draft in (_random, _coupled)}
    assert accepted[_coupled] > 1.2 * accepted[_random]


def test_noise_shared_between_positions_is_noticed() -> None:
    case = Case(())
    table = _table(case, SEEDS[:1], VOCAB)
    positions = torch.arange(DRAWS)
    none = torch.full((DRAWS, 1), -1)
    first = _choose(case, table, torch.full((DRAWS,), FIRST), positions, none).clone()  # the next choice overwrites it
    second = _choose(case, table, first, positions, first[:, None])
    assert _p_value(_joint_counts(first, second), _joint_law(case)) < ALPHA
    # each token alone looks right, so it takes the joint law to see it
    assert _p_value(torch.bincount(first, minlength=VOCAB).numpy(), case.law(NEXT_LOGITS[FIRST].tolist(), ())) > ALPHA


@pytest.mark.parametrize("wrong", [{"temperature": 1.04}, {"bias": ((3, 0.1),)}, {"frequency": 0.1}, {"top_p": 0.999}])
def test_a_small_bias_is_noticed(wrong: dict[str, float]) -> None:
    right = Case((2.0, 1.0, 0.5, 0.5, -1.0, -5.0), generated=TEXT)
    biased = Case(right.logits, generated=TEXT, **wrong)  # type: ignore[arg-type]
    rows = SamplingRows(
        _table(biased, SEEDS[:1], 6),
        torch.zeros(DRAWS, dtype=torch.int64),
        torch.arange(DRAWS),
        torch.full((DRAWS,), len(TEXT)),
        torch.zeros(DRAWS, 0, dtype=torch.int64),
    )
    tokens = choose_tokens(torch.tensor(right.logits).expand(DRAWS, -1), rows).tokens
    assert _p_value(torch.bincount(tokens, minlength=6).numpy(), right.law(right.logits, ())) < ALPHA
