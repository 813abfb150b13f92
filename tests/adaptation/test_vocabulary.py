"""Places in the draft vocabulary go to tokens that are said, and to no others."""

import pytest
import torch

from adaptation.policy import State
from adaptation.vocabulary import DraftVocabulary, TokenCounts, untrained_rows
from tests.adaptation.samples import HIDDEN, drafter
from tests.drafters.specblock.parts import DRAFT_VOCAB
from tests.tiny_models import VOCAB_SIZE

DEPLOYED = torch.tensor([0, 2, 4, 6, 8])


def heard(*answers: list[int], least_count: int = 2) -> DraftVocabulary:
    vocabulary = DraftVocabulary(TokenCounts(20), least_count=least_count)
    for answer in answers:
        vocabulary.observe(answer)
    return vocabulary


def test_a_token_that_is_said_takes_the_place_of_the_last_one_that_is_not() -> None:
    vocabulary = heard([11, 11, 8, 2], [11, 13, 13, 8])
    assert vocabulary.wanted(DEPLOYED).tolist() == [0, 2, 13, 11, 8]
    assert DEPLOYED.tolist() == [0, 2, 4, 6, 8]


def test_once_said_is_not_enough_and_what_is_there_stays() -> None:
    assert heard([11, 13, 15]).wanted(DEPLOYED).tolist() == DEPLOYED.tolist()
    vocabulary = heard([11, 11, 13, 13], [11, 13])
    first = vocabulary.wanted(DEPLOYED)
    assert torch.equal(vocabulary.wanted(first), first)


def test_a_place_is_taken_only_by_what_is_said_more_often() -> None:
    said = [token for token in DEPLOYED.tolist() for _ in range(3)]
    assert heard(said, [11] * 4).wanted(DEPLOYED).tolist() == DEPLOYED.tolist()
    assert heard(said, [11] * 4, [11] * 2).wanted(DEPLOYED).tolist() == [0, 2, 4, 6, 11]


def test_no_single_answer_decides() -> None:
    said = [token for token in DEPLOYED.tolist() for _ in range(4)]
    assert heard(said, [11] * 500).wanted(DEPLOYED).tolist() == DEPLOYED.tolist()


def test_more_missing_tokens_than_places_leave_none_twice() -> None:
    vocabulary = heard([token for token in range(9, 20) for _ in range(2)])
    wanted = vocabulary.wanted(DEPLOYED)
    assert wanted.unique().shape == wanted.shape
    assert all(token > 8 for token in wanted.tolist())


def test_switched_off_it_stays_as_deployed() -> None:
    vocabulary = heard([11] * 4, [11] * 4, least_count=0)
    assert vocabulary.wanted(DEPLOYED) is DEPLOYED
    assert vocabulary.counts.state() == {"tokens": [], "counts": []}


def test_what_was_said_long_ago_counts_less() -> None:
    counts = TokenCounts(20)
    counts.observe([11] * 4)
    for _ in range(3):
        counts.observe([1] * 65_536)
    assert counts.of(torch.tensor([11])).item() == pytest.approx(0.5, rel=1e-3)


def test_counts_outlive_the_process() -> None:
    vocabulary = heard([11, 11, 8, 2], [11, 13, 13, 8])
    later = heard()
    later.counts.restore(vocabulary.counts.state())
    assert later.counts.state() == vocabulary.counts.state()
    assert torch.equal(later.wanted(DEPLOYED), vocabulary.wanted(DEPLOYED))


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"tokens": [1], "counts": 3.0},
        {"tokens": [1], "counts": [1.0, 2.0]},
        {"tokens": [20], "counts": [1.0]},
        {"tokens": [-1], "counts": [1.0]},
        {"tokens": [1], "counts": [float("nan")]},
        {"tokens": [1], "counts": [-1.0]},
        {"tokens": ["a"], "counts": [1.0]},
    ],
)
def test_what_are_no_counts_is_refused_and_changes_nothing(state: State) -> None:
    vocabulary = heard([11, 11])
    before = vocabulary.counts.state()
    with pytest.raises(ValueError, match=r"tokens|_Said"):
        vocabulary.counts.restore(state)
    assert vocabulary.counts.state() == before


def test_rows_are_the_deployed_ones_where_there_are_any_and_the_targets_elsewhere() -> None:
    deployed = drafter()
    head = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(0))
    rows = untrained_rows(deployed, head)
    assert torch.equal(rows(deployed.d2t), deployed.lm_head.weight)
    foreign = (deployed.t2d < 0).nonzero()[:, 0][:DRAFT_VOCAB]
    assert torch.equal(rows(foreign), head[foreign])
    mixed = torch.cat([foreign[:3], deployed.d2t.flip(0)[3:]])
    assert torch.equal(rows(mixed)[:3], head[foreign[:3]])
    assert torch.equal(rows(mixed)[3:], deployed.lm_head.weight.flip(0)[3:])


def test_without_the_targets_rows_there_are_only_the_deployed_ones() -> None:
    rows = untrained_rows(drafter(), None)
    assert torch.equal(rows(drafter().d2t), drafter().lm_head.weight)
