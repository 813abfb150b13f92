"""Of each tree's first block its claims about the positions that came to be committed are kept, and nothing else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from drafters.feedback import QueryFeedback
from drafters.network.recording import FeedbackRecorder
from drafters.protocol import Committed, DraftContext, Read
from drafters.tree import DraftTree, VerifyResult
from tests.drafters.network.parts import tiny_drafter
from tests.drafters.test_feedback import query

CONFIG = tiny_drafter(block_size=4).config
ROWS, BLOCK, TARGET_VOCAB, TOP = 3, 4, 20, 2
WIDTH, HIDDEN = CONFIG.features_size, CONFIG.hidden_size
T2D = torch.where(torch.arange(TARGET_VOCAB) % 2 == 0, torch.arange(TARGET_VOCAB) // 2, -1)


def recorder(wanted: Callable[[], bool] = lambda: True) -> FeedbackRecorder:
    dtype = torch.float32
    return FeedbackRecorder(CONFIG, T2D, max_sequences=ROWS, window_tokens=32, top=TOP, dtype=dtype, wanted=wanted)


def block(seed: int, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """States and log-probabilities of one first block."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(rows, BLOCK, HIDDEN, generator=generator)
    return states, torch.randn(rows, BLOCK, TARGET_VOCAB // 2, generator=generator).log_softmax(-1)


def committed(row: int, root: int, tokens: list[int], nodes: int = 3) -> Committed:
    ids = torch.tensor([[*tokens, -1]])
    count, wide = torch.tensor([len(tokens)]), (1, len(tokens) + 1)
    tree = DraftTree.of(torch.zeros(1, nodes, dtype=torch.int64), torch.full((1, nodes), -1))
    result, features = VerifyResult(ids[:, :0], count - 1, ids[:, :0]), torch.zeros(*wide, WIDTH)
    logits, chosen_by = torch.randn(len(tokens), TARGET_VOCAB), torch.tensor([[*range(len(tokens)), 0]])
    given = torch.tensor([row]), ids, count, tree, result, features, torch.tensor([root]), ids
    return Committed(*given, logits=logits, chosen_by=chosen_by)


def drive(recorder: FeedbackRecorder, tokens: list[int], *, drafts: bool = True) -> QueryFeedback:
    """A prompt of three tokens and one step that commits these."""
    recorder.start([DraftContext(1, [1, 2, 3])])
    if drafts:
        recorder.grown(torch.tensor([1]), torch.tensor([2]), *block(7))
    recorder.commit(committed(1, 2, tokens), grown=drafts)
    recorder.end([1])
    return recorder.finish(query(1, 3 + len(tokens)))


def test_the_claims_of_a_block_stand_beside_the_committed_token() -> None:
    draft_labels = drive(recorder(), [4, 7, 10]).draft_labels
    states, logprobs = block(7)
    assert draft_labels.positions.tolist() == [3, 4, 5]
    assert draft_labels.tokens.tolist() == [4, 7, 10]
    assert torch.equal(draft_labels.states, states[0, :3])
    exponents = logprobs[0, [0, 2], [2, 5]].double()
    # Rounding an exponent e moves exp(e) by a part of |e| eps; logsumexp and exp are rounded themselves.
    rounded = (float(exponents.abs().max()) + 2) * torch.finfo(torch.float32).eps
    first, none, third = draft_labels.chances.tolist()
    assert none == 0.0
    assert [first, third] == pytest.approx(exponents.exp().tolist(), rel=rounded)
    assert draft_labels.rejected.tolist() == [False, False, True]


def test_a_block_says_nothing_beyond_its_own_length() -> None:
    draft_labels = drive(recorder(), [0, 2, 4, 6, 8, 10]).draft_labels
    assert draft_labels.positions.tolist() == [3, 4, 5, 6]


def test_without_a_tree_nothing_was_written() -> None:
    assert drive(recorder(), [4], drafts=False).draft_labels.count == 0


def test_claims_about_an_earlier_root_are_not_taken_for_this_one() -> None:
    recording = recorder()
    recording.start([DraftContext(1, [1, 2, 3])])
    recording.grown(torch.tensor([1]), torch.tensor([2]), *block(7))
    recording.commit(committed(1, 2, [4, 6]), grown=True)
    recording.commit(committed(1, 4, [8]), grown=True)
    recording.end([1])
    assert recording.finish(query(1, 6)).draft_labels.positions.tolist() == [3, 4]


def test_rows_do_not_hear_each_other() -> None:
    recording = recorder()
    recording.start([DraftContext(row, [1, 2, 3]) for row in range(ROWS)])
    states, logprobs = block(3, rows=2)
    recording.grown(torch.tensor([2, 0]), torch.tensor([2, 2]), states, logprobs)
    for row in range(ROWS):
        recording.commit(committed(row, 2, [4]), grown=True)
    recording.end(range(ROWS))
    spoken = {row: recording.finish(query(row, 4)).draft_labels for row in range(ROWS)}
    assert torch.equal(spoken[2].states, states[:1, 0])
    assert torch.equal(spoken[0].states, states[1:, 0])
    assert spoken[1].count == 0


def test_scores_are_wanted_while_a_sequence_runs() -> None:
    recording = recorder()
    wanted = [recording.wants_scores]
    recording.start([DraftContext(1, [1, 2, 3])])
    wanted.append(recording.wants_scores)
    recording.end([1])
    wanted.append(recording.wants_scores)
    assert wanted == [False, True, False]


def test_what_must_not_be_stored_is_never_recorded() -> None:
    answers = iter([True])
    recording = recorder(lambda: next(answers))  # asked once: no one is of private sequences
    recording.start([DraftContext(0, [1, 2, 3], store=False)])
    assert not recording.wants_scores
    recording.start([DraftContext(1, [1, 2, 3])])
    states, logprobs = block(3, rows=2)
    recording.grown(torch.tensor([0, 1]), torch.tensor([2, 2]), states, logprobs)
    for row in (0, 1):
        recording.commit(committed(row, 2, [4]), grown=True)
    recording.end([0, 1])
    private, public = (recording.finish(query(row, 4)) for row in (0, 1))
    assert (private.recorded, private.draft_labels.count, private.features.shape[0]) == (False, 0, 0)
    assert (public.recorded, public.draft_labels.count) == (True, 1)


def test_of_a_sequence_that_is_not_wanted_nothing_is_kept() -> None:
    answers = iter([False, True, False])
    recording = recorder(lambda: next(answers))
    recording.start([DraftContext(0, [1, 2, 3]), DraftContext(1, [1, 2, 3])])
    states, logprobs = block(3, rows=2)
    for row in (0, 1):
        recording.read(Read(row, 0, torch.tensor([2, 3]), torch.tensor([5, 6]), torch.ones(2, WIDTH)))
    recording.grown(torch.tensor([0, 1]), torch.tensor([2, 2]), states, logprobs)
    for row in (0, 1):
        recording.commit(committed(row, 2, [4]), grown=True)
    recording.end([0, 1])
    unheard, heard = (recording.finish(query(row, 4)) for row in (0, 1))
    assert (unheard.recorded, heard.recorded) == (False, True)
    assert (unheard.draft_labels.count, heard.draft_labels.count) == (0, 1)
    assert (unheard.features.shape[0], unheard.top_ids.shape[0]) == (0, 0)
    assert heard.features.shape[0] == 3
    recording.start([DraftContext(1, [1, 2, 3])])  # the row of one that was wanted
    assert not recording.wants_scores
    assert not recording.finish(query(1, 4)).recorded


def test_what_waits_is_kept_in_the_order_of_the_text_however_many_steps_it_took() -> None:
    recording = recorder()
    recording.start([DraftContext(1, [1, 2, 3])])
    steps = [committed(1, 2 + 2 * number, [2 * number % TARGET_VOCAB, 6]) for number in range(12)]
    spoken = []
    for number, step in enumerate(steps):
        if grown := number % 3 != 1:
            recording.grown(torch.tensor([1]), step.positions, *block(number))
            spoken += [block(number)[0][0, :2]]
        recording.commit(step, grown=grown)
    recording.end([1])
    heard = recording.finish(query(1, 3 + 2 * len(steps)))
    expected = torch.cat([step.logits for step in steps if step.logits is not None]).log_softmax(-1).topk(TOP)
    assert torch.equal(heard.top_ids, expected.indices.int())
    assert torch.allclose(heard.top_logprobs.float(), expected.values, atol=1e-2)
    places = [3 + 2 * number + ahead for number in range(len(steps)) if number % 3 != 1 for ahead in (0, 1)]
    assert heard.draft_labels.positions.tolist() == places
    assert torch.equal(heard.draft_labels.states, torch.cat(spoken))


def test_blocks_that_spoke_before_a_step_without_any_are_not_heard_again() -> None:
    recording = recorder()
    recording.start([DraftContext(1, [1, 2, 3])])
    recording.grown(torch.tensor([1]), torch.tensor([2]), *block(7))
    recording.commit(committed(1, 2, [4, 6]), grown=False)
    recording.end([1])
    assert recording.finish(query(1, 5)).draft_labels.count == 0


def test_what_waits_of_a_private_sequence_never_reaches_the_one_that_gets_its_row() -> None:
    recording = recorder()
    recording.start([DraftContext(0, [1, 2, 3]), DraftContext(1, [1, 2, 3], store=False)])
    private = committed(1, 2, [4, 6])
    recording.commit(replace(private, features=torch.full((1, 3, WIDTH), 9.0)), grown=False)
    recording.end([1])
    recording.start([DraftContext(1, [1, 2, 3, 5, 7])])
    read = Read(1, 0, torch.tensor([2, 3, 5, 7]), torch.tensor([5, 6, 7, 8]), torch.ones(4, WIDTH))
    recording.read(read)
    recording.grown(torch.tensor([1]), torch.tensor([4]), *block(7))
    recording.commit(committed(1, 4, [8]), grown=True)
    recording.end([1])
    heard = recording.finish(query(1, 6))
    assert heard.features[:, 0].tolist() == [1.0] * 4 + [0.0]
    assert heard.draft_labels.tokens.tolist() == [8]
