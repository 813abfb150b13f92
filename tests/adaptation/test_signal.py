"""The signal by hand, the clip on one query, and texts that a drafter can be trained and scored on."""

from dataclasses import replace

import pytest
import torch

from adaptation.samples import UndraftedSignal, example_of, training_sample, undrafted_steps
from drafters.training.corpus import Batch
from drafters.training.replay import replay_chain
from tests.adaptation.samples import ANSWER, EMBED, PROMPT, drafter, feedback

torch.set_num_threads(1)


def test_the_signal_is_what_the_drafter_did_not_believe_in() -> None:
    heard = feedback(0, rejected=3)
    labels = replace(heard.draft_labels, chances=torch.tensor([0.25, 0.0, 1.0] + [0.9] * (ANSWER - 3)))
    assert training_sample(replace(heard, draft_labels=labels), most_rejected=3).signal == 0.75 + 1.0 + 0.0


def test_a_query_counts_for_so_many_positions_at_most() -> None:
    draft_labels = feedback(0, rejected=12).draft_labels
    sample = training_sample(feedback(0, rejected=12), most_rejected=1)
    assert sample.num_rejected == 1
    assert sample.draft_labels.positions[sample.draft_labels.rejected].tolist() == [draft_labels.positions[11]]
    assert sample.draft_labels.count == 1 + 3
    assert sample.signal <= 1.0
    assert training_sample(feedback(0, rejected=12), most_rejected=50).draft_labels.count == ANSWER


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


def test_a_text_can_be_replayed() -> None:
    text = example_of(feedback(0))
    assert text is not None
    assert replay_chain(drafter(), EMBED, text).tokens == ANSWER - 1


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


def test_steps_that_no_block_spoke_of_are_those_without_a_rejected_mark() -> None:
    heard = feedback(0, rejected=3, accepted=(1, 2, 0))
    assert undrafted_steps(heard) == 0
    assert undrafted_steps(replace(heard, query=replace(heard.query, plain_steps=7))) == 7
    beside_another_drafter = feedback(0, rejected=1, accepted=(5, 2, 0))
    assert undrafted_steps(beside_another_drafter) == 2


def test_what_nobody_spoke_of_teaches_as_much_as_blocks_missed_elsewhere() -> None:
    undrafted = UndraftedSignal()
    assert undrafted.signal(4) == 4.0
    sample = replace(training_sample(feedback(0, rejected=10), most_rejected=10), signal=2.5)
    for _ in range(100):
        undrafted.observe(sample)
    assert undrafted.signal(4) == pytest.approx(4 * 0.25, rel=0.02)
    undrafted.observe(replace(sample, signal=0.0, num_rejected=0))
    assert undrafted.signal(4) == pytest.approx(4 * 0.25, rel=0.02)
