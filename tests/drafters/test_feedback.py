"""A recorder against a plain list of what happened, over texts longer than its tables and in any order of rows."""

import random

import pytest
import torch
from torch import Tensor

from drafters.feedback import Query, QueryFeedback
from drafters.network.recording import FeedbackRecorder
from drafters.protocol import Committed, DraftContext, Read
from drafters.tree import DraftTree, VerifyResult
from tests.drafters.network.parts import tiny_drafter

CONFIG = tiny_drafter().config
WIDTH, HIDDEN, BLOCK, TOP, WINDOW, VOCAB = CONFIG.features_size, CONFIG.hidden_size, CONFIG.block_size, 5, 20, 2200


def recorder() -> FeedbackRecorder:
    t2d = torch.arange(VOCAB)
    return FeedbackRecorder(CONFIG, t2d, max_sequences=3, window_tokens=WINDOW, top=TOP, dtype=torch.float32)


def query(row: int, length: int) -> Query:
    return Query(
        row=row,
        tokens=list(range(length)),
        num_prompt=1,
        client="a",
        store=True,
        temperature=0.0,
        seed=0,
        first_version=0,
        version=1,
        accepted=(2, 0),
        plain_steps=3,
        seconds=0.1,
    )


def telling(rows: Tensor, positions: Tensor, width: int) -> Tensor:
    """A value for each position of each row that no other has. # rows [batch], positions [batch, count] -> [batch,
    count, width]"""
    return (1000.0 * rows[:, None] + positions)[..., None].expand(*positions.shape, width)


def features_of(row: int, positions: Tensor) -> Tensor:
    """The features of one row's positions. # [count] -> [count, width]"""
    return telling(torch.tensor([row]), positions[None], WIDTH)[0]


def commit(tables: FeedbackRecorder, rows: list[int], roots: list[int], counts: list[int], *, nodes: int = 1) -> None:
    """A step in which everything kept at a position tells row and position."""
    row, root, count = map(torch.tensor, (rows, roots, counts))
    here = root[:, None] + torch.arange(max(counts))
    tokens, block = telling(row, here + 1, 1)[..., 0].long(), root[:, None] + 1 + torch.arange(BLOCK)
    tables.grown(row, root, telling(row, block, HIDDEN), torch.zeros(*block.shape, VOCAB))
    logits = torch.zeros(tokens.numel(), VOCAB)
    logits.scatter_(1, tokens.view(-1, 1) + torch.arange(TOP), (5.0 - torch.arange(TOP)).expand(len(logits), -1))
    tree = DraftTree.of(torch.zeros(len(rows), nodes, dtype=torch.int64), torch.full((len(rows), nodes), -1))
    verdict, chosen_by = VerifyResult(tokens, count - 1, tokens), torch.arange(len(logits)).view_as(tokens)
    given = row, tokens, count, tree, verdict, telling(row, here, WIDTH), root, tokens
    tables.commit(Committed(*given, logits=logits, chosen_by=chosen_by), grown=True)


def drive(tables: FeedbackRecorder, row: int, prompt: int, read_from: int, counts: list[int]) -> QueryFeedback:
    """One sequence alone, from its prompt to its end."""
    tables.start([DraftContext(row, list(range(prompt)))])
    middle = (read_from + prompt - 1) // 2
    for start, end in ((read_from, middle), (middle, prompt - 1)):
        positions = torch.arange(start, end)
        if positions.shape[0]:
            tables.read(Read(row, start, positions + 1, positions, features_of(row, positions)))
    root = prompt - 1
    for count in counts:
        commit(tables, [row], [root], [count])
        root += count
    return tables.finish(query(row, root + 1))


@pytest.mark.parametrize("prompt", [1, 2, 9, 60])
@pytest.mark.parametrize("counts", [[1], [1, 5, 2], [3] * 4, [5] * 9])
def test_every_position_keeps_its_own(prompt: int, counts: list[int]) -> None:
    tables, row = recorder(), 2
    heard = drive(tables, row, prompt, 0, counts)
    length = prompt + sum(counts)
    first, labelled = max(0, length - WINDOW), max(prompt, length - WINDOW)
    assert (heard.first, heard.prompt) == (first, labelled)
    assert torch.equal(heard.features, features_of(row, torch.arange(first, length - 1)))
    assert heard.top_ids[:, 0].tolist() == [1000 * row + position for position in range(labelled, length)]
    expected = torch.cat([5.0 - torch.arange(TOP), torch.zeros(VOCAB - TOP)]).log_softmax(0)[:TOP].half()
    assert torch.allclose(heard.top_logprobs, expected, atol=1e-2)


@pytest.mark.parametrize("counts", [[1, 5, 2], [4] * 9])
def test_marks_are_the_positions_that_a_block_predicted(counts: list[int]) -> None:
    heard = drive(recorder(), 1, 9, 0, counts)
    length, position = 9 + sum(counts), 9
    expected: dict[int, bool] = {}
    for count in counts:
        expected |= {position + place: place == count - 1 for place in range(min(count, BLOCK))}
        position += count
    expected = {place: rejected for place, rejected in expected.items() if place >= length - WINDOW}
    draft_labels = heard.draft_labels
    assert dict(zip(draft_labels.positions.tolist(), draft_labels.rejected.tolist(), strict=True)) == expected
    assert (draft_labels.tokens - 1000).tolist() == draft_labels.positions.tolist()
    assert torch.equal(draft_labels.states[:, 0], draft_labels.tokens.float())
    assert torch.equal(draft_labels.top_ids[:, 0], draft_labels.tokens.int())
    assert torch.allclose(draft_labels.chances, torch.tensor(1 / VOCAB))
    assert draft_labels.take(draft_labels.rejected).count == sum(expected.values())


def test_a_step_without_drafted_nodes_rejects_nothing() -> None:
    tables = recorder()
    tables.start([DraftContext(0, [1, 2, 3])])
    commit(tables, [0], [2], [1], nodes=0)
    assert not tables.finish(query(0, 4)).draft_labels.rejected.any()


def test_positions_of_a_cached_prefix_have_no_features() -> None:
    heard = drive(recorder(), 0, 12, 7, [2, 2])
    assert heard.first == 7
    assert torch.equal(heard.features, features_of(0, torch.arange(7, 15)))


def test_what_was_written_before_a_preemption_counts_as_prompt() -> None:
    tables = recorder()
    drive(tables, 0, 5, 0, [3])
    heard = drive(tables, 0, 8, 0, [2, 1])
    assert heard.prompt == 8
    assert heard.draft_labels.positions.min() >= 8


def test_a_row_leaves_nothing_to_the_next() -> None:
    tables = recorder()
    drive(tables, 0, 5, 0, [5, 5, 5])
    tables.start([DraftContext(0, list(range(5)))])
    assert tables.finish(query(0, 5)).draft_labels.count == 0


def test_an_answer_that_stops_inside_a_step_ends_there() -> None:
    tables = recorder()
    tables.start([DraftContext(0, list(range(3)))])
    root = 2
    for count in (5, 5, 5, 5):
        commit(tables, [0], [root], [count])
        root += count
    heard = tables.finish(query(0, root - 2))
    assert heard.features[-1, 0] == root - 4
    assert heard.top_ids[:, 0].tolist() == list(range(3, root - 2))
    assert heard.draft_labels.positions.max() < root - 2


def test_rows_beside_each_other_do_not_mix() -> None:
    rng, counts = random.Random(0), {0: [2, 5, 1], 1: [1, 1, 4], 2: [5, 5, 5]}
    alone = {row: drive(recorder(), row, 6, 5, list(took)) for row, took in counts.items()}
    tables, roots = recorder(), dict.fromkeys(counts, 5)
    tables.start([DraftContext(row, list(range(6))) for row in counts])
    for number in range(3):
        rows = rng.sample(sorted(counts), 3)
        commit(tables, rows, [roots[row] for row in rows], [counts[row][number] for row in rows])
        roots = {row: root + counts[row][number] for row, root in roots.items()}
    for row, heard in alone.items():
        beside = tables.finish(query(row, roots[row] + 1))
        assert torch.equal(beside.features, heard.features)
        assert torch.equal(beside.top_ids, heard.top_ids)
        assert torch.equal(beside.draft_labels.states, heard.draft_labels.states)
