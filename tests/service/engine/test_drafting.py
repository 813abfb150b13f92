"""The draft stage: what the drafter is told, and how far its candidates are cut before they are verified."""

from collections.abc import Sequence as Items

import torch
from torch import Tensor, nn

from drafters.protocol import Committed, DraftContext, Noise, Read
from drafters.tree import Candidates
from service.engine.budget import FixedBudget
from service.engine.drafting import DraftStage
from service.engine.generation import Sequence
from service.engine.scheduler import Batch, Scheduled
from service.engine.sequence import SamplingParams, SpeculationParams
from tests.service.engine.harness import greedy, request
from tests.service.engine.test_budget import candidates_of
from tests.service.engine.test_scheduler import sequence_of

CPU = torch.device("cpu")


class Recorder:
    """Proposes the same six-node chain to everyone and keeps what it was told."""

    name, version, tap_layers = "recorder", 0, ()

    def __init__(self) -> None:
        self.started: list[DraftContext] = []
        self.asked: list[tuple[list[int], Noise]] = []

    def start(self, contexts: Items[DraftContext]) -> None:
        self.started += contexts

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self.asked.append((rows.tolist(), noise))
        return candidates_of([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]] * rows.shape[0])

    def read(self, read: Read) -> None: ...

    def commit(self, committed: Committed) -> None: ...

    def credits(self) -> dict[str, int]:
        return {}

    def finish(self, rows: Items[int]) -> list[int]:
        return [0] * len(rows)

    def trainable(self) -> nn.Module | None:
        return None


def decoding(
    row: int, generated: int = 3, max_tokens: int = 100, speculation: SpeculationParams | None = None
) -> Sequence:
    sequence = sequence_of(8, greedy(max_tokens))
    sequence.request = request("r", [2] * 8, greedy(max_tokens), speculation=speculation)
    sequence.row, sequence.tokens = row, [2] * (8 + generated)
    sequence.num_computed = len(sequence.tokens) - 1
    return sequence


def batch_of(*sequences: Sequence, reading: int = 0) -> Batch:
    items = [Scheduled.of(sequence, 1) for sequence in sequences]
    for row in range(reading):
        prompt = sequence_of(20)
        prompt.row = 20 + row
        items.append(Scheduled.of(prompt, 5))
    return Batch(items, [])


def sizes(*sequences: Sequence, free: int = 100, budget: int = 5, reading: int = 0) -> list[int]:
    stage = DraftStage(Recorder(), FixedBudget(99), max_budget=budget, device=CPU)
    tree, _ = stage.build(batch_of(*sequences, reading=reading), free)
    assert tree.batch == len(sequences) + reading
    found: list[int] = tree.num_nodes.tolist()
    return found


def test_the_budget_bounds_every_tree() -> None:
    assert sizes(decoding(0), decoding(1)) == [5, 5]
    assert sizes(decoding(0), budget=0) == [0]


def test_nothing_is_drafted_that_could_not_be_emitted() -> None:
    """With m tokens left, m - 1 drafted ones and the bonus token fill them."""
    ends = [decoding(0, generated=10 - left, max_tokens=10) for left in (1, 2, 4, 9)]
    assert sizes(*ends) == [0, 1, 3, 5]


def test_a_request_may_ask_for_less() -> None:
    wishes = [SpeculationParams(enabled=False), SpeculationParams(max_budget=2), SpeculationParams(max_budget=50), None]
    assert sizes(*(decoding(row, speculation=wish) for row, wish in enumerate(wishes))) == [0, 2, 5, 5]


def test_prompts_get_no_tree_and_leave_room_for_their_rows() -> None:
    assert sizes(decoding(0), reading=2) == [5, 0, 0]
    assert sizes(decoding(0), reading=2, free=1 + 2 * 5 + 3) == [3, 0, 0]
    assert sizes(reading=1) == [0]


def test_the_drafter_is_told_of_whoever_starts() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    again = decoding(3, generated=4)
    stage.start([])
    stage.start([again])
    (context,) = recorder.started
    assert (context.row, list(context.tokens), context.num_generated) == (3, again.tokens, 4)


def test_the_drafter_is_told_the_noise_of_the_roots() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    one, two = decoding(4, generated=2), decoding(6)
    one.sampling = sequence_of(8, SamplingParams(seed=-5, max_tokens=9, temperature=0.5)).sampling
    stage.build(batch_of(one, two), 100)
    ((rows, noise),) = recorder.asked
    assert rows == [4, 6]
    assert noise.seeds.tolist() == [-5, 0]
    assert noise.temperatures.tolist() == [0.5, 0.0]
    assert noise.positions.tolist() == [9, 10]


def test_a_drafter_that_nobody_wants_is_not_asked() -> None:
    recorder = Recorder()
    stage = DraftStage(recorder, FixedBudget(9), max_budget=5, device=CPU)
    tree, _ = stage.build(batch_of(decoding(0, speculation=SpeculationParams(enabled=False)), reading=1), 100)
    assert tree.num_nodes.tolist() == [0, 0]
    assert recorder.asked == []
