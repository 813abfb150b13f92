"""Learning beside an engine, everything real but the size: it learns in its turns and holds still between them."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError
from dataclasses import replace
from pathlib import Path

import pytest

from adaptation.config import PolicyName, Tuning
from adaptation.records import Event
from adaptation.trainer import UpdateReport
from drafters.feedback import QueryFeedback
from service.assembly import Assembly
from service.bench.experiment import Measure
from service.bench.shift_figures import mismatches
from service.bench.shift_play import Counts, Learning, Noted, Notes, Player, play_all, players_of, shifted, turns_of
from service.learning.adaptive import Adaptive, build_adaptive
from service.prompts import PromptSet
from tests.service.bench.parts import varied_prompts
from tests.service.bench.shift_parts import EAGER, EAGER_NUMBERS
from tests.service.engine.test_thread import eventually
from tests.tuned import tune

PROMPTS = PromptSet("some", tuple(tuple(prompt[:40]) for prompt in varied_prompts()))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, EAGER_NUMBERS)


@pytest.fixture
def adaptive(trained_assembly: Assembly, tmp_path: Path) -> Iterator[Adaptive]:
    built = build_adaptive(trained_assembly, EAGER, folder=tmp_path, emit=lambda event: None)
    yield built
    built.stop()


def test_the_thread_holds_still_until_its_turn(adaptive: Adaptive) -> None:
    learning = Learning(adaptive)
    asked = adaptive.worker.ask(lambda: "awake")
    with pytest.raises(TimeoutError):
        asked.result(0.1)
    learning.go_on()
    assert asked.result(5) == "awake"
    learning.hold()
    assert learning.counts() == Counts()
    learning.close()
    assert not adaptive.worker.alive


class Endless:
    """Learning that is always amid an update."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_interrupted = 0

    def observe(self, feedback: QueryFeedback) -> None:
        raise AssertionError("nobody asks anything")

    def update(self, interrupted: Callable[[], bool]) -> UpdateReport | None:
        while not interrupted():
            self.num_steps += 1
            time.sleep(0.001)
        self.num_interrupted += 1
        return None

    def recover(self, error: str) -> None:
        raise AssertionError(error)

    def save(self, *, training: bool) -> None:
        assert training

    def goes_on(self, within_seconds: float) -> bool:
        """Whether a step begins in that time; nobody waits longer than it takes."""
        before, deadline = self.num_steps, time.monotonic() + within_seconds
        while self.num_steps == before and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.num_steps > before


def test_it_holds_still_amid_an_update_and_goes_on_with_it(adaptive: Adaptive) -> None:
    loop = Endless()
    adaptive.worker.loop = loop
    learning = Learning(adaptive)
    for _ in range(3):
        assert not loop.goes_on(within_seconds=0.1)
        learning.go_on()
        assert loop.goes_on(within_seconds=30)
        learning.hold()
    assert loop.num_interrupted == 0
    learning.close()
    assert loop.num_interrupted == 1
    assert not adaptive.worker.alive


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that processes share")
def test_a_process_that_trains_is_stopped_amid_its_update(trained_assembly: Assembly, tmp_path: Path) -> None:
    config = EAGER.model_copy(update={"policy": "full_only", "train_in": "process"})
    tuning = Tuning(full_steps=1024)
    adaptive = build_adaptive(trained_assembly, config, folder=tmp_path, emit=lambda event: None, tuning=tuning)
    process = adaptive.learner.process
    assert process is not None
    learning = Learning(adaptive)
    player = Player("full_only", adaptive.engine, learning, Notes())
    turns = turns_of(shifted([PROMPTS], [PROMPTS], 16, seed=0), 16)
    assert process.num_started == 1, "no query is to wait for its imports"
    try:
        player.play(turns[0], Measure(0.0, 10, 2, seed=3))
        learning.go_on()
        eventually(lambda: process.is_asked)
        learning.hold()
        assert process.pid is not None
        eventually(lambda: state_of(process.pid) == "T")
        learning.go_on()
        eventually(lambda: state_of(process.pid) in "RS")
    finally:
        learning.close()
    assert process.pid is None


def state_of(pid: int | None) -> str:
    """As Linux calls it: R running, S sleeping, T stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.usefixtures("in_no_hurry")
@pytest.mark.parametrize(("policy", "temperature"), [("head_only", 0.0), ("full_only", 0.8)])
def test_a_policy_learns_in_its_turns_and_writes_the_same_text(
    trained_assembly: Assembly, policy: PolicyName, temperature: float
) -> None:
    """Under a fixed budget, or so small a target would seldom find that drafting pays."""
    config = trained_assembly.config.model_copy(update={"adaptation": EAGER})
    assembly = replace(trained_assembly, config=config, costs=None, drafter_name="specblock")
    turns = turns_of(shifted([PROMPTS], [PROMPTS], 16, seed=0), 4)
    with players_of(assembly, {policy: policy, "never": "never"}, 0) as players:
        played = play_all(players, dict.fromkeys((policy, "never"), turns), Measure(temperature, 10, 2, seed=3))
    mine, plain = (sum((turn.counts for turn in played[name]), Counts()) for name in (policy, "never"))
    assert plain == Counts()
    updates = {"head_only": mine.updates_head, "full_only": mine.updates_full}
    assert updates.pop(policy) > 0
    assert list(updates.values()) == [0]
    assert mine.training_seconds > 0
    assert mismatches(played[policy], played["never"]) == 0
    noted = [(turn.turn.first, noted) for turn in played[policy] for noted in turn.noted]
    kinds = [one.event.kind for _, one in noted]
    assert (kinds.count("published"), kinds.count("refused")) == (mine.publishes, mine.refusals)
    assert mine.publishes + mine.refusals == mine.updates_head + mine.updates_full
    assert all(first <= one.query <= first + 4 for first, one in noted)


def test_counts_are_added_and_subtracted() -> None:
    some, more = Counts(training_seconds=1.5, updates_head=2), Counts(training_seconds=2.0, updates_head=3, publishes=1)
    assert more - some == Counts(training_seconds=0.5, updates_head=1, publishes=1)
    assert some + Counts() == some


def test_notes_know_after_how_many_queries_they_came() -> None:
    notes, event = Notes(), Event("refused", 0, "no_gain")
    notes.note(event)
    notes.answered = 7
    notes.note(event)
    assert notes.take() == (Noted(0, event), Noted(7, event))
    assert notes.take() == ()
    notes.note(event)
    notes.clear()
    assert (notes.answered, notes.take()) == (0, ())
