"""Gate and alarms over recorded streams, with real replays by a tiny drafter that was trained until it is good.

What was recorded: 32 answers of a tiny target, as its engine reported them, features and all. A stream draws from them.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor

from adaptation.learner import Learner
from adaptation.monitor import PairedCusum
from adaptation.records import Event
from adaptation.samples import training_sample
from adaptation.timing import Pieces
from adaptation.trainer import UpdateReport
from drafters.feedback import QueryFeedback
from tests.adaptation.drafts import same
from tests.adaptation.samples import score
from tests.practised import Practised, practised

WINDOW = 16
TEXTS = 32
PATIENCE_SECONDS = 60.0
STATIONARY_WINDOWS = 200
KNOBS: dict[str, object] = {
    "policy": "full_only",
    "full_queries": 2,
    "validation_share": 0.5,
    "validation_texts": TEXTS,
    "gate_texts": WINDOW,
    "alarm_texts": WINDOW // 2,
    "client_free_queries": 10**6,
    "client_share": 1.0,
    "snapshots": 3,
}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Practised:
    return practised(tmp_path_factory.mktemp("practised"), num_texts=TEXTS, updates=2)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)


def serving_the_good_one(known: Practised, folder: Path, emit: list[Event], **knobs: object) -> Learner:
    """A learner whose anchor is good at nothing; it serves the trained drafter as its first version."""
    built = known.learner(folder, emit.append, known.first, **{**KNOBS, **knobs})
    built.adopt(known.good)
    built.weights.between_steps()
    emit.clear()
    return built


def observe(built: Learner, stream: list[QueryFeedback]) -> None:
    for feedback in stream:
        built.observe(feedback)
    score(built)


@torch.no_grad()
def perturb(weights: dict[str, Tensor], scale: float, seed: int) -> None:
    """Noise in proportion to each tensor's own size."""
    generator = torch.Generator().manual_seed(seed)
    for value in filter(torch.is_floating_point, weights.values()):
        size = float(value.float().std()) if value.numel() > 1 else 1.0
        value.add_(scale * size * torch.randn(value.shape, generator=generator).to(value.dtype))


def test_a_bad_candidate_is_refused_20_of_20_times(
    known: Practised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update of this trainer makes the drafter worse."""
    events: list[Event] = []
    built = serving_the_good_one(known, tmp_path, events)
    observe(built, known.stream(0, 80, version=1))
    served = {name: value.clone() for name, value in built.weights._served.weights.items()}
    seeds = iter(range(20))

    def spoil(arm: object, samples: object) -> Pieces[UpdateReport]:
        seed = next(seeds)
        perturb(dict(built.weights.training.named_parameters()), 0.15 + 0.02 * seed, seed)
        yield
        return UpdateReport("full", "applied", 0.0)

    monkeypatch.setattr(built.training, "update", spoil)
    for number in range(20):
        while not built.work():
            observe(built, known.stream(100 + number, 2, version=1))
        while built._job is not None:
            built.work()
    built.weights.between_steps()
    falls = [event.numbers["serving"] - event.numbers["candidate"] for event in events]
    print(f"20 candidates whose replayed tau was {min(falls):.2f} to {max(falls):.2f} lower")
    assert [(event.kind, event.reason) for event in events] == [("refused", "worse_than_serving")] * 20
    assert min(falls) > 0.05
    assert built.weights.version == 1
    assert same(built.weights._served.weights, served)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_poison_that_was_published_is_taken_back_within_one_window(known: Practised, tmp_path: Path, seed: int) -> None:
    """The gate was off. What was recorded as served says nothing, so that replays alone must see it."""
    events: list[Event] = []
    built = serving_the_good_one(known, tmp_path, events)
    observe(built, known.stream(seed, 40, version=1))
    perturb(dict(built.weights.training.named_parameters()), (0.5, 1.0, 3.0)[seed % 3], seed)
    poisoned = built.weights.publish({})
    built._publisher.monitor.weights_changed()
    built.weights.between_steps()
    events.clear()
    queries = 0
    for feedback in known.stream(1000 + seed, WINDOW, version=poisoned):
        observe(built, [feedback])
        queries += 1
        if events:
            break
    built.weights.between_steps()
    print(f"taken back after {queries} queries: {[(event.kind, event.reason) for event in events]}")
    assert [event.kind for event in events] == ["rolled_back"]
    assert (built.weights.origin, built.weights.condemned) == (1, {poisoned})
    assert same(built.weights._served.weights, known.good)


def scores_of(known: Practised, built: Learner, weights: dict[str, Tensor]) -> list[float]:
    """Replayed tau of a drafter on every recorded text."""
    with torch.no_grad():
        for name, value in built.weights.training.named_parameters():
            value.copy_(weights[name])
    model, judge = built.weights.candidate(), built._publisher.evaluator
    examples = (training_sample(feedback, most_rejected=1).example for feedback in known.recorded)
    scores = [judge._replay(model, example) for example in examples if example is not None]
    return [score for score in scores if isinstance(score, float)]


def twin_of(known: Practised, built: Learner) -> dict[str, Tensor]:
    """Of some drafters that differ a little from the good one, the one that is as good as it in the mean."""
    good = fmean(scores_of(known, built, known.good))

    def twin(seed: int) -> dict[str, Tensor]:
        weights = {name: value.clone() for name, value in known.good.items()}
        perturb(weights, 0.02, seed)
        return weights

    return min(map(twin, range(16)), key=lambda weights: abs(fmean(scores_of(known, built, weights)) - good))


@pytest.mark.slow
def test_at_most_two_false_rollbacks_in_200_stationary_windows(known: Practised, tmp_path: Path) -> None:
    """The drafter that serves, the one it has replaced and the anchor are equally good, and not the same: in the mean
    of four streams, for which windows are condemned by chance hangs on the last bit of a score."""
    streams = 4
    found = [false_rollbacks(known, tmp_path / str(seed), seed) for seed in range(streams)]
    print(f"{streams} times {STATIONARY_WINDOWS} windows, rolled back: {found}")
    assert sum(found) <= 2 * streams


def false_rollbacks(known: Practised, folder: Path, seed: int) -> int:
    """In one stream, on nearly all texts: on a few of them one of two equally good drafters is the better one."""
    events: list[Event] = []
    built = known.learner(folder, events.append, known.good, **{**KNOBS, "policy": "never", "validation_share": 0.9})
    twin = twin_of(known, built)
    stream = known.stream(seed, STATIONARY_WINDOWS * WINDOW, version=0)
    for feedback in stream:
        if built.weights.origin == 0:  # not yet published, or taken back
            publish(built, twin)
        version = built.weights.version
        observe(built, [replace(feedback, query=replace(feedback.query, first_version=version, version=version))])
        built.weights.between_steps()
    return sum(event.kind == "rolled_back" for event in events)


def publish(built: Learner, weights: dict[str, Tensor]) -> None:
    """As after an update, but without the gate."""
    with torch.no_grad():
        for name, value in built.weights.training.named_parameters():
            value.copy_(weights[name])
    built.weights.publish({})
    built._publisher.monitor.weights_changed()
    built.weights.between_steps()


def test_the_paired_alarm_is_quiet_on_the_noise_of_real_replays(known: Practised, tmp_path: Path) -> None:
    """On which of two equally good drafters serves a coin decides, text by text: 20 streams of 200 windows."""
    built = known.learner(tmp_path, lambda event: None, known.good, **KNOBS)
    pairs = list(zip(scores_of(known, built, known.good), scores_of(known, built, twin_of(known, built)), strict=True))
    false_alarms = [count_alarms(pairs, random.Random(seed)) for seed in range(20)]
    print(f"{sum(false_alarms)} false alarms in 20 times {STATIONARY_WINDOWS} windows: {false_alarms}")
    assert max(false_alarms) <= 2


def count_alarms(pairs: Sequence[tuple[float, float]], rng: random.Random) -> int:
    cusum, fired = PairedCusum(least_pairs=WINDOW // 2), 0
    for _ in range(STATIONARY_WINDOWS):
        drawn = [rng.sample(pair, 2) for pair in rng.choices(pairs, k=WINDOW)]
        if cusum.observe([ours for ours, _ in drawn], [theirs for _, theirs in drawn]):
            fired += 1
            cusum.reset()
    return fired
