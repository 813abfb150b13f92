"""Which sequences draft: classes that gain and classes that lose in one batch, and what is kept between starts."""

import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from drafters.decision import CAP_STEPS, SHARE, TRIAL_STEPS, RegretLedger
from kernels.graph_runner import Capture, rerun
from service.engine.budget import CostBudget, keep_gains, restore_gains
from service.engine.costs import FREE
from service.engine.draft_gate import DRAFTING, DraftGate, SequenceGain, traffic_class
from service.engine.requests import SamplingParams
from tests.service.engine.harness import generate, greedy, load_of, request, tiny_engine
from tests.service.engine.test_budget import table
from tests.tiny_models import random_prompts

DAY = 86_400.0
CLASSES = ("greedy", "cool", "warm")


def gate_of(affordable_steps: float = 2.0) -> DraftGate:
    """A gate whose ledger covers so many steps of each class: by default a step, but no trial."""
    ledger = RegretLedger()
    for traffic in CLASSES:
        ledger.open(f"{DRAFTING} {traffic}", CAP_STEPS, balance=affordable_steps)
    return DraftGate(ledger, 1.0)


def taught(
    gate: DraftGate, steps: int, true_gain: dict[str, float], texts: Sequence[SequenceGain], seed: int = 0
) -> int:
    """So many steps of these texts, whose gains have a deviation of 1; in how many texts' steps they were asked."""
    rng, asked_steps = random.Random(seed), 0
    for step in range(steps):
        asks = gate.choose(texts, starts=step % 100 == 0, step_seconds=1.0)
        asked = [text for text, is_asked in zip(texts, asks, strict=True) if is_asked]
        others = [text for text, is_asked in zip(texts, asks, strict=True) if not is_asked]
        if asked:
            seen = [rng.gauss(true_gain[text.traffic], 1.0) for text in asked]
            gate.observe(asked, seen, seen, len(texts), all_drafted=not others)
        gate.skip(others, len(texts))
        asked_steps += len(asked)
    return asked_steps


def test_kinds_are_temperature_and_grammar() -> None:
    heats = {heat: traffic_class(heat, has_grammar=False) for heat in (0.0, 0.2, 0.8, 0.81, 1.5)}
    assert heats == {0.0: "greedy", 0.2: "cool", 0.8: "cool", 0.81: "warm", 1.5: "warm"}
    assert traffic_class(0.0, has_grammar=True) == "greedy+grammar"
    assert traffic_class(1.0, has_grammar=False, is_filtered=True) == "cool"


def test_sequences_of_a_gaining_class_draft_and_those_of_a_losing_class_do_not() -> None:
    gate, truth = gate_of(), {"greedy": 0.5, "warm": -0.3}
    greedy_texts, warm = [SequenceGain("greedy") for _ in range(4)], [SequenceGain("warm") for _ in range(4)]
    taught(gate, 200, truth, [*greedy_texts, *warm])
    assert taught(gate, 500, truth, [*greedy_texts, *warm]) <= 500 * (4 + 0.4)
    assert gate.choose([*greedy_texts, *warm], starts=False, step_seconds=1.0) == [True] * 4 + [False] * 4


def test_alternating_texts_each_keep_what_they_have_alone() -> None:
    """One at a time, gaining 0.5 and losing 0.2 by turns: one mean of both would draft for all."""
    asked = {"greedy": 0, "warm": 0}
    for seed in range(8):
        gate, truth = gate_of(), {"greedy": 0.5, "warm": -0.2}
        for text in range(60):
            kind = ("greedy", "warm")[text % 2]
            asked[kind] += taught(gate, 100, truth, [SequenceGain(kind)], seed=1000 * seed + text)
    assert asked["greedy"] >= 0.98 * 8 * 3000
    assert asked["warm"] <= 0.2 * 8 * 3000


def test_a_text_that_loses_leaves_though_its_kind_gains() -> None:
    gate = gate_of()
    good, bad = [SequenceGain("greedy") for _ in range(7)], SequenceGain("greedy")
    rng = random.Random(0)
    for _ in range(150):
        texts = [*good, bad]
        asked = [
            text for text, asks in zip(texts, gate.choose(texts, starts=False, step_seconds=1.0), strict=True) if asks
        ]
        seen = [rng.gauss(-0.8 if text is bad else 0.5, 1.0) for text in asked]
        gate.observe(asked, seen, seen, 8, all_drafted=len(asked) == 8)
    assert gate.choose([*good, bad], starts=False, step_seconds=1.0) == [True] * 7 + [False]


def test_a_text_that_gains_stays_though_its_kind_loses() -> None:
    gate, lucky = gate_of(), SequenceGain("warm")
    rng = random.Random(0)
    for _ in range(120):
        gate.observe([lucky], [rng.gauss(0.8, 1.0)], [rng.gauss(0.8, 1.0)], 1, all_drafted=True)
    for _ in range(400):
        gate.gain(1, "warm").observe(-0.5)
    found = [gate.choose([one], starts=False, step_seconds=1.0) for one in (lucky, SequenceGain("warm"))]
    assert found == [[True], [False]]


@pytest.mark.parametrize(("true_gain", "drafted"), [(0.8, {100}), (-0.5, range(TRIAL_STEPS, 2 * TRIAL_STEPS + 1))])
def test_a_sequence_of_a_losing_class_is_tried_and_stays_where_it_gains(
    true_gain: float, drafted: Collection[int]
) -> None:
    """Other sequences have taught that the class loses; a new one starts, and the ledger covers a trial."""
    gate, rng, one = gate_of(TRIAL_STEPS), random.Random(1), SequenceGain("greedy")
    for _ in range(60):
        gate.gain(1, "greedy").observe(rng.gauss(-0.5, 1.0))
    assert not gate.gain(1, "greedy").may_gain
    assert gate.choose([one], starts=True, step_seconds=1.1) == [False], "the ledger covers no trial"
    assert gate.choose([one], starts=True, step_seconds=1.0) == [True]
    steps = 0
    for _ in range(100):
        if gate.choose([one], starts=False, step_seconds=1.0) == [True]:
            seen = [rng.gauss(true_gain, 1.0)]
            gate.observe([one], seen, seen, 1, all_drafted=True)
            steps += 1
    assert steps in drafted


def test_a_class_that_surely_loses_a_step_is_not_tried() -> None:
    gate = gate_of(CAP_STEPS)
    for _ in range(300):
        gate.gain(1, "greedy").observe(-1.3)
    assert gate.choose([SequenceGain("greedy")], starts=True, step_seconds=1.0) == [False]


def test_no_sequence_drafts_where_the_ledger_does_not_cover_a_step() -> None:
    assert gate_of(0.9).choose([SequenceGain("greedy")], starts=True, step_seconds=1.0) == [False]


def budget() -> CostBudget:
    return CostBudget(table([1.0, 100.0], [1.0, 2.0]), FREE, RegretLedger())


def known() -> CostBudget:
    policy = budget()
    taught(policy.gate, 500, {"greedy": 0.5, "warm": -0.3}, [SequenceGain("greedy"), SequenceGain("warm")])
    return policy


def test_where_none_drafts_nothing_is_decided_until_a_sequence_starts_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, decided, choose = budget(), list[bool](), DraftGate.choose

    def noted(gate: DraftGate, sequences: Sequence[SequenceGain], *, starts: bool, step_seconds: float) -> list[bool]:
        decided.append(starts)
        return choose(gate, sequences, starts=starts, step_seconds=step_seconds)

    monkeypatch.setattr(DraftGate, "choose", noted)
    losing = [SequenceGain() for _ in range(2)]
    for count in (1, 2) * 300:
        policy.gate.gain(count).observe(-1.3)
    for decoding, starts in ((losing, True), (losing, False), (losing[:1], False), (losing[:1], False)):
        assert policy.decide(load_of(decoding=decoding), starts=starts).reason == "suspended"
    assert decided == [True, False]
    policy.on_weights_changed()
    assert policy.decide(load_of(decoding=losing[:1]), starts=False).reason != "suspended"


@pytest.mark.parametrize(("age", "sd"), [(0.0, "as it was"), (DAY / 2, "between"), (10 * DAY, "as at first")])
def test_what_was_known_at_the_last_stop_is_known_at_the_start_less_sure_by_its_age(
    tmp_path: Path, age: float, sd: str
) -> None:
    before, after, file = known(), budget(), tmp_path / "gains.json"
    keep_gains(before.gate, file)
    restore_gains(after.gate, file, now=json.loads(file.read_text())["saved"] + age)
    for kind in ("greedy", "warm"):
        old, new = before.gate.gain(2, kind), after.gate.gain(2, kind)
        assert new.mean == old.mean
        assert {"as it was": new.sd == old.sd, "between": old.sd < new.sd < 1.0, "as at first": new.sd == 1.0}[sd]
    promises = [after.gate.gain(2, traffic).may_gain for traffic in ("greedy", "warm")]
    assert promises == [True, age > 0.0], "what is not sure is tried again"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"saved": 0}',
        '{"saved": 0, "state": {"gains": [["warm", 2, [0, -1, 1, 1]]], "plain": [], "left": []}}',
        '{"saved": 0, "state": {"gains": [], "plain": [], "left": [["warm"]]}}',
    ],
)
def test_a_file_that_is_damaged_is_left_out(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    file, policy = tmp_path / "gains.json", budget()
    file.write_text(content)
    restore_gains(policy.gate, file)
    assert "learning them anew" in caplog.text
    assert policy.gate.gain(2, "warm").mean == 0.0


def drafted_gains(file: Path, traffic: str, true_gain: float, seed: int) -> dict[int, float]:
    """One start of a server that answers four texts of a class, of 100 steps each: the gains of steps with drafts."""
    ledger, rng, text = RegretLedger(), random.Random(seed), SequenceGain(traffic)
    policy, gains = CostBudget(table([1.0, 100.0], [1.0, 2.0]), FREE, ledger), dict[int, float]()
    restore_gains(policy.gate, file)
    for step in range(400):
        text = SequenceGain(traffic) if step % 100 == 0 else text
        if policy.gate.choose([text], starts=step % 100 == 0, step_seconds=1.0) == [True]:
            gain = gains[step] = rng.gauss(true_gain, 0.7)
            policy.gate.observe([text], [gain], [gain], 1, all_drafted=True)
            policy.gate.settle(traffic, gain)
        else:
            policy.gate.skip([text], 1)
        ledger.accrue(1.0)
    keep_gains(policy.gate, file)
    return gains


def test_a_restart_does_not_try_again_what_lost_and_drafts_at_once_what_gained(tmp_path: Path) -> None:
    """Of four starts: the ledger goes on where it stood, instead of with 16 steps more each time."""
    for seed in range(5):
        losing, gaining = (
            [drafted_gains(tmp_path / f"{seed}-{traffic}", traffic, gain, 9 * seed + start) for start in range(4)]
            for traffic, gain in (("warm", -0.3), ("greedy", 0.5))
        )
        assert sum(sum(gains.values()) for gains in losing) > -(CAP_STEPS + SHARE * 1600 + 4)
        assert 0 in losing[0]
        assert all(sum(gains.values()) > -(SHARE * 400 + 3) for gains in losing[1:])
        assert all(len(gains) > 380 and 0 in gains for gains in gaining)


def test_where_nothing_was_kept_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = budget()
    restore_gains(policy.gate, tmp_path / "gains.json")
    assert (policy.gate.decision.state(), caplog.text) == (budget().gate.decision.state(), "")


def test_what_is_unsure_of_texts_that_do_not_draft_takes_no_baseline_from_those_that_do() -> None:
    """Drafting surely gains for one text, and is suspended for the other, of which too little is known to be sure."""
    policy, size = budget(), 2  # of two or three sequences
    known = [["greedy", size, [0.5, 0.0064, 1.0, 100]], ["warm", size, [-0.1, 0.0064, 1.0, 100]]]
    plain = [[size, [1.0, 0.0025, 0.01, 100]]]
    policy.gate.restore({"gains": known, "plain": plain, "left": []}, 0.0)
    texts = SequenceGain("greedy"), SequenceGain("warm")
    assert not policy.gate.needs_plain_step(texts[:1], 2)
    assert policy.gate.needs_plain_step(texts, 2)


class OnlyGreedy(DraftGate):
    """Asks the drafter for texts at temperature 0 alone."""

    def choose(self, texts: Sequence[SequenceGain], *, starts: bool, step_seconds: float) -> list[bool]:
        return [text.traffic == "greedy" for text in texts]


def only_greedy() -> CostBudget:
    policy = CostBudget(table([1.0, 100.0], [2e-3, 2e-3]), FREE, RegretLedger())
    policy.gate = OnlyGreedy(RegretLedger(), 2e-3)
    return policy


@pytest.mark.parametrize("capture", [None, rerun], ids=["eager", "captured"])
def test_texts_that_draft_and_texts_that_do_not_stand_in_one_batch_and_are_plain_decodings(
    capture: Capture | None,
) -> None:
    params = [greedy(40), SamplingParams(seed=3, max_tokens=40, temperature=1.0, ignore_eos=True)] * 3
    asked = [request(str(n), prompt, params[n]) for n, prompt in enumerate(random_prompts(6, 20))]
    plain = generate(tiny_engine(drafter="none", policy=only_greedy()), *asked)
    found = generate(tiny_engine(drafter="random", policy=only_greedy(), capture=capture), *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in plain.items()}
    drafted = {name: one.end.speculation.drafted_per_step for (name, _), one in found.items() if one.end.speculation}
    assert all(any(nodes) == (int(name) % 2 == 0) for name, nodes in drafted.items())
