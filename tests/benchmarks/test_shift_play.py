"""The stream of the shift benchmark, turns in which no one works beside another, and learning that holds still between
them."""

import sys
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError
from dataclasses import replace
from pathlib import Path

import pytest

from adaptation.config import AdaptationConfig, Tuning
from adaptation.records import Event
from benchmarks.policies import PolicyName, fixed_policy
from benchmarks.shift_play import (
    NOTHING,
    Counts,
    Learning,
    Notes,
    Player,
    PoissonArrivals,
    joined,
    play_all,
    players_of,
    shifted,
    turns_of,
)
from service.assembly import Assembly
from service.bench.driver import ClosedLoop
from service.bench.experiment import Measure, mismatches
from service.learning.adaptive import Adaptive, build_adaptive
from service.text.prompts import PromptSet
from tests.benchmarks.shift_parts import EAGER, EAGER_NUMBERS, MEASURE, prompt_set
from tests.service.bench.parts import varied_prompts
from tests.service.engine.test_thread import eventually
from tests.tuned import tune

PROMPTS = PromptSet("some", tuple(map(tuple, varied_prompts())))
SHORT = PromptSet("some", tuple(prompt[:40] for prompt in PROMPTS.prompts))
OLD = [prompt_set("few", 3), prompt_set("many", 50, first=100)]
NEW = [prompt_set("new", 20, first=1000)]


def test_a_shift_in_the_middle() -> None:
    stream = shifted(OLD, NEW, 21, seed=4)
    old, new = stream.phases
    assert (old.name, new.name) == ("few + many", "new")
    assert (len(old.prompts), len(new.prompts), stream.new_from, stream.num_queries) == (10, 11, 10, 21)
    assert all(prompt < (1000,) for prompt in old.prompts)
    assert all(prompt >= (1000,) for prompt in new.prompts)
    assert len(set(old.prompts) | set(new.prompts)) == 21


def test_turns_end_where_traffic_changes() -> None:
    stream = shifted(OLD, NEW, 24, seed=0)
    turns = turns_of(stream, 5, MEASURE)
    assert [len(turn.requests) for turn in turns] == [5, 5, 2, 5, 5, 2]
    assert [turn.phase for turn in turns] == [0, 0, 0, 1, 1, 1]
    assert [turn.first for turn in turns] == [0, 5, 10, 12, 17, 22]
    assert [turn.window for turn in turns] == list(range(6))
    prompts = [request.prompt for turn in turns for request in turn.requests]
    assert prompts == [prompt for phase in stream.phases for prompt in phase.prompts]


STREAM = shifted([PROMPTS], [PROMPTS], 12, seed=0)
TURNS = turns_of(STREAM, 4, Measure(0.0, 6, 1, seed=1))


class Slow(Learning):
    """Learning that takes a while until it stands still, and then has published."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._held = 0

    def go_on(self) -> None: ...

    def hold(self) -> None:
        time.sleep(0.02)
        self._held += 1
        self._notes.note(Event("published", 1, "better", {}))

    def counts(self) -> Counts:
        return {**NOTHING, "training_seconds": 0.25 * self._held, "publishes": self._held}


def test_queries_that_arrive_at_random_leave_the_engine_idle_between_them(assembly: Assembly) -> None:
    players = [Player(name, assembly.engine()) for name in ("never", "other")]
    everybody = play_all(players, dict.fromkeys(("never", "other"), TURNS), Measure(0.0, 6, 1, seed=1), load=0.1)
    for name, mine in everybody.items():
        later = joined(mine[1:])
        assert later.seconds < 0.5 * later.run.seconds, name
        assert mismatches([joined(everybody["never"]).run], [joined(mine).run]) == 0


def test_a_turn_counts_its_own_learning_and_all_its_time(assembly: Assembly) -> None:
    notes = Notes()
    player = Player("a", assembly.engine(), Slow(notes), notes)
    player.warm_up(PROMPTS.prompts[0])
    turns = [player.play(turn, ClosedLoop(1)) for turn in TURNS]
    assert [turn.counts for turn in turns] == [{**NOTHING, "training_seconds": 0.25, "publishes": 1}] * len(TURNS)
    assert [[noted.query for noted in turn.noted] for turn in turns] == [[4], [6], [10], [12]]
    assert all(0 < turn.seconds <= turn.run.seconds for turn in turns), "without the time until learning stands still"
    gaps = [sum(gap for step in turn.run.steps for gap in step.stats.itl_seconds) for turn in turns]
    assert all(0 < mine < turn.run.seconds for mine, turn in zip(gaps, turns, strict=True))


def learning_as(assembly: Assembly, config: AdaptationConfig) -> Assembly:
    return replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tune(monkeypatch, EAGER_NUMBERS)


@pytest.fixture
def adaptive(at_once: None, trained_assembly: Assembly, tmp_path: Path) -> Iterator[Adaptive]:
    built = build_adaptive(learning_as(trained_assembly, EAGER), folder=tmp_path, emit=lambda event: None)
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
    assert learning.counts() == NOTHING
    learning.close()
    assert not adaptive.worker.alive


@pytest.mark.slow
@pytest.mark.usefixtures("at_once")
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that processes share")
def test_a_process_that_trains_is_stopped_amid_its_update(trained_assembly: Assembly, tmp_path: Path) -> None:
    assembly = learning_as(trained_assembly, EAGER.model_copy(update={"train_in": "process"}))
    tuning = Tuning(full_steps=1024, gate_texts=2)
    policy = fixed_policy("full_only", tuning)
    adaptive = build_adaptive(assembly, folder=tmp_path, emit=lambda event: None, tuning=tuning, policy=policy)
    process = adaptive.learner.training.process
    assert process is not None
    learning = Learning(adaptive)
    player = Player("full_only", adaptive.engine, learning, Notes())
    turns = turns_of(shifted([SHORT], [SHORT], 16, seed=0), 16, Measure(0.0, 10, 2, seed=3))
    assert process.num_started == 1, "no query is to wait for its imports"
    try:
        player.play(turns[0], ClosedLoop(2))
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


@pytest.mark.usefixtures("at_once", "in_no_hurry")
@pytest.mark.parametrize(("policy", "temperature"), [("head_only", 0.0), ("full_only", 0.8)])
def test_a_policy_learns_in_its_turns_and_writes_the_same_text(
    trained_assembly: Assembly, policy: PolicyName, temperature: float
) -> None:
    """Under a fixed budget, or so small a target would seldom find that drafting pays."""
    assembly = replace(learning_as(trained_assembly, EAGER), costs=None, drafter_name="specblock")
    measure = Measure(temperature, 10, 2, seed=3)
    turns = turns_of(shifted([SHORT], [SHORT], 16, seed=0), 4, measure)
    with players_of(assembly, {policy: policy, "never": "never"}, 0) as players:
        played = play_all(players, dict.fromkeys((policy, "never"), turns), measure)
    mine, plain = (joined(played[name]) for name in (policy, "never"))
    assert plain.counts == NOTHING
    updates = {"head_only": mine.counts["updates_head"], "full_only": mine.counts["updates_full"]}
    assert updates.pop(policy) > 0
    assert list(updates.values()) == [0]
    assert mine.counts["training_seconds"] > 0
    assert mismatches([plain.run], [mine.run]) == 0
    noted = [(turn.turn.first, noted) for turn in played[policy] for noted in turn.noted]
    kinds = [one.event.kind for _, one in noted]
    assert (kinds.count("published"), kinds.count("refused")) == (mine.counts["publishes"], mine.counts["refusals"])
    assert len(kinds) >= mine.counts["publishes"] + mine.counts["refusals"] == mine.counts[f"updates_{policy[:4]}"]
    assert all(first <= one.query <= first + 4 for first, one in noted)


def test_poisson_arrivals_are_seeded_and_have_their_rate() -> None:
    arrivals = PoissonArrivals(20.0, 2_000, seed=1)
    same = PoissonArrivals(20.0, 2_000, seed=1)
    assert [arrivals.since(number, 0.0) for number in range(50)] == [same.since(number, 9.0) for number in range(50)]
    assert 1_800 < arrivals.due(100.0, 0) <= 2_000
    assert arrivals.due(0.0, 7) == 0
