"""The signal by hand, the clip on one query, and texts that a drafter can be trained and scored on."""

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from adaptation.feedback import RisingScores, TokenCounts, TrafficMonitor
from adaptation.policy import ARMS, Arm, State
from adaptation.replay_buffer import ReplayBuffer
from adaptation.samples import (
    SampleBuffers,
    TrainingSample,
    ValidationSet,
    example_of,
    training_sample,
)
from drafters.training.corpus import Batch
from tests.adaptation.samples import ANSWER, PROMPT, feedback, samples


def test_the_signal_is_what_the_drafter_did_not_believe_in() -> None:
    heard = feedback(0, rejected=3)
    labels = replace(heard.draft_labels, chances=torch.tensor([0.25, 0.0, 1.0] + [0.9] * (ANSWER - 3)))
    assert training_sample(replace(heard, draft_labels=labels), most_rejected=3).signal == 0.75 + 1.0 + 0.0


def test_the_text_keeps_its_labels_when_its_beginning_was_lost() -> None:
    whole = feedback(0)
    lost = PROMPT + 3
    cut = replace(
        whole,
        first=lost,
        prompt=lost,
        features=whole.features[lost:],
        top_ids=whole.top_ids[3:],
        top_logprobs=whole.top_logprobs[3:],
    )
    full, part = example_of(whole), example_of(cut)
    assert full is not None
    assert part is not None
    assert part.tokens.tolist() == full.tokens[lost:].tolist()
    assert part.prompt == 2
    assert torch.equal(part.top_ids, full.top_ids[5:])
    assert part.length == part.features.shape[0]
    left, right = (Batch.of([text], 8, "cpu").label_index[0] for text in (full, part))
    assert (left >= 0).sum() == ANSWER
    assert (right >= 0).sum() == ANSWER - 5


@pytest.mark.parametrize("answer", [0, 1, 3])
def test_an_answer_of_a_few_tokens_is_no_text(answer: int) -> None:
    heard = feedback(0)
    short = replace(
        heard,
        query=replace(heard.query, tokens=heard.query.tokens[: PROMPT + answer]),
        features=heard.features[: PROMPT + answer - 1],
        top_ids=heard.top_ids[:answer],
        top_logprobs=heard.top_logprobs[:answer],
    )
    assert example_of(short) is None


def buffers_of(max_positions: int, max_samples: Mapping[Arm, int], *, update_samples: int = 9) -> SampleBuffers:
    replay = ReplayBuffer(1 << 30, client_share=1.0)
    return SampleBuffers(max_samples, replay, max_positions=max_positions, update_samples=update_samples)


def test_the_oldest_lessons_make_room_and_are_counted() -> None:
    rng, buffers = (
        random.Random(0),
        buffers_of(40, {"head": 100, "full": 100}),
    )
    kept: deque[tuple[Arm, TrainingSample]] = deque()
    dropped = 0
    for sample in samples(12):
        arm = rng.choice(ARMS)
        buffers.add(arm, sample)
        kept.append((arm, sample))
        while sum(one.num_rejected for _, one in kept) > 40:
            kept.popleft()
            dropped += 1
        assert buffers.positions == sum(one.num_rejected for _, one in kept) <= 40
    assert buffers.num_dropped == dropped > 0
    for arm in ARMS:
        expected = [one.signal for name, one in kept if name == arm]
        assert [one.signal for one in buffers.take(arm)] == expected
        assert buffers.counts[arm] == 0


def test_an_arm_keeps_its_newest_samples() -> None:
    buffers = buffers_of(10_000, {"head": 2, "full": 3})
    given = samples(5)
    for sample in given:
        for arm in ARMS:
            buffers.add(arm, sample)
    assert buffers.num_dropped == 5
    assert [one.signal for one in buffers.take("head")] == [one.signal for one in given[3:]]
    assert [one.signal for one in buffers.take("full")] == [one.signal for one in given[2:]]


def test_what_was_taken_waits_again_as_the_oldest_once_it_is_put_back() -> None:
    buffers = buffers_of(10_000, {"head": 9, "full": 9})
    given = samples(5)
    arms: list[Arm] = ["full", "head", "full", "head"]
    for arm, sample in zip(arms, given, strict=False):
        buffers.add(arm, sample)
    taken = buffers.take("full")
    buffers.put_back()
    buffers.put_back()
    buffers.add("full", given[4])
    signals = [sample.signal for sample in given]
    assert buffers.signals == {"head": signals[1:4:2], "full": [signals[0], signals[2], signals[4]]}
    assert [id(sample) for sample in taken][-2:] == [id(sample) for sample in buffers.take("full")[-3:-1]]


def test_only_full_updates_keep_texts() -> None:
    buffers = buffers_of(100, {"head": 100, "full": 100})
    (sample,) = samples(1)
    for arm in ARMS:
        buffers.add(arm, sample)
    assert [one.example is None for one in buffers.take("head")] == [True]
    assert [one.example is sample.example for one in buffers.take("full")] == [True]


def test_full_updates_hear_other_texts_again_and_leave_room_for_new_ones() -> None:
    buffers = buffers_of(10_000, {"head": 9, "full": 9}, update_samples=4)
    asked = [feedback(seed) for seed in range(12)]
    given = [
        replace(sample, example=buffers.replay.add(sample.example, one.query))
        for sample, one in zip(samples(12), asked, strict=True)
        if sample.example is not None
    ]
    heard = Counter[int]()
    for sample in given[8:]:
        buffers.add("full", sample)
        *again, newest = buffers.take("full")
        assert newest is sample
        assert len(again) == 3
        heard.update(id(one.example) for one in (*again, newest))
    assert sorted(heard.values()) == [1] * 8 + [2] * 4, "a pass over all of them, and the first of the next"
    for sample in given[:6]:
        buffers.add("full", sample)
    assert len(buffers.take("full")) == 6, "new ones are heard even when there are more than fit"
    buffers.add("full", given[0])
    buffers.clear_queues()
    assert (buffers.counts["full"], len(buffers.replay)) == (0, 12)


def test_a_share_is_held_back_and_the_newest_are_kept() -> None:
    validation = ValidationSet(share=0.2, enough=2, max_texts=3, rng=random.Random(0))
    assert 0.45 * 5000 < sum(validation.draws() for _ in range(5000)) < 0.55 * 5000, "there are none yet"
    texts = [validation.number(sample.example, "") for sample in samples(5) if sample.example is not None]
    for text in texts:
        validation.keep(text)
    assert 0.18 * 5000 < sum(validation.draws() for _ in range(5000)) < 0.22 * 5000
    assert list(validation.texts) == texts[-3:]
    assert len({text.number for text in texts}) == 5


# Answers of other words are noticed in a few queries; the same words, however well they come to be known, are not.


def change() -> RisingScores:
    return RisingScores()


def scores(mean: float, *, seed: int = 0, spread: float = 0.1) -> Iterator[float]:
    rng = random.Random(seed)
    while True:
        yield rng.gauss(mean, spread)


def first_change(traffic: RisingScores, queries: Iterator[float], most: int) -> int | None:
    return next((number for number, score in zip(range(most), queries, strict=False) if traffic.observe(score)), None)


def test_higher_scores_are_soon_noticed() -> None:
    for seed in range(3, 13):
        traffic = change()
        assert first_change(traffic, scores(0.4, seed=seed), 150) is None
        found = first_change(traffic, scores(0.6, seed=seed + 100), 40)
        assert found is not None
        assert found < 20


def test_the_same_traffic_is_seldom_called_another() -> None:
    traffic, queries = change(), scores(0.4)
    assert sum(traffic.observe(next(queries)) for _ in range(30_000)) < 10


def test_what_is_usual_is_learnt_anew_after_a_change() -> None:
    traffic = change()
    first_change(traffic, scores(0.4), 150)
    assert first_change(traffic, scores(0.8), 40) is not None
    assert first_change(traffic, scores(0.8, seed=1), 150) is None
    assert first_change(traffic, scores(1.2, seed=2), 40) is not None


VOCAB = 5000


def words() -> TrafficMonitor:
    return TrafficMonitor(VOCAB)


def texts(count: int, *, language: int, seed: int = 0) -> list[list[int]]:
    """Of a language of a thousand words, a few of them frequent; some texts are long and some are short."""
    rng = random.Random(seed)
    known = random.Random(language).sample(range(VOCAB), 1000)
    weights = [1 / (rank + 1) for rank in range(len(known))]
    return [rng.choices(known, weights, k=rng.randrange(10, 200)) for _ in range(count)]


def noticed(heard: TrafficMonitor, spoken: Sequence[list[int]]) -> list[int]:
    return [number for number, text in enumerate(spoken) if heard.observe(text)]


@pytest.mark.parametrize("queries", [60, 100, 300])
def test_another_language_is_noticed_in_a_few_queries(queries: int) -> None:
    for seed in range(6):
        heard = words()
        assert noticed(heard, texts(queries, language=1, seed=seed)) == []
        found = noticed(heard, texts(12, language=2, seed=seed))
        assert found
        assert found[0] < 8


def test_one_of_several_languages_alone_is_noticed() -> None:
    for seed in range(6):
        heard = words()
        mixed = [
            text for three in zip(*(texts(70, language=n, seed=n) for n in range(3)), strict=True) for text in three
        ]
        assert noticed(heard, mixed) == []
        found = noticed(heard, texts(40, language=1, seed=seed + 10))
        assert found
        assert found[0] < 30


def test_an_empty_answer_says_nothing() -> None:
    assert not words().observe([])


def test_the_same_language_becomes_known_and_is_never_called_another() -> None:
    assert noticed(words(), texts(3000, language=1)) == []


def test_of_a_long_text_only_its_end_is_heard() -> None:
    ends = [text * 60 for text in texts(110, language=1)[:100] + texts(10, language=2)]
    whole, cut = ([[*before, *text[:512]] for text in ends] for before in ([7] * 3000, []))
    assert noticed(words(), whole) == noticed(words(), cut) != []


def test_the_most_frequent_tokens_are_those_of_most_answers_and_old_ones_count_less() -> None:
    counts = TokenCounts(20)
    counts.observe([11] * 500)  # no single answer decides
    for _ in range(2):
        counts.observe([3] * 4)
    assert counts.of(torch.tensor([11, 3])).tolist() == pytest.approx([4.0, 8.0], rel=0.01)
    assert counts.most_frequent(3).tolist() == [0, 3, 11]
    for _ in range(3):
        counts.observe([1] * 65_536)
    assert counts.of(torch.tensor([11])).item() == pytest.approx(0.5, rel=0.02)


def test_counts_outlive_the_process() -> None:
    counts, later = TokenCounts(20), TokenCounts(20)
    counts.observe([11, 11, 8, 2])
    later.restore(counts.state())
    assert later.state() == counts.state() == {"tokens": [2, 8, 11], "counts": [1.0, 1.0, 2.0]}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"tokens": [1], "counts": 3.0},
        {"tokens": [1], "counts": [1.0, 2.0]},
        {"tokens": [20], "counts": [1.0]},
        {"tokens": [-1], "counts": [1.0]},
        {"tokens": [1], "counts": [float("nan")]},
        {"tokens": ["a"], "counts": [1.0]},
    ],
)
def test_what_are_no_counts_is_refused_and_changes_nothing(state: State) -> None:
    counts = TokenCounts(20)
    counts.observe([11, 11])
    before = counts.state()
    with pytest.raises(ValueError, match=r"tokens|_StoredCounts"):
        counts.restore(state)
    assert counts.state() == before
