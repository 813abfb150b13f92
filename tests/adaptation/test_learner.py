"""The whole loop on a tiny drafter: what helps is published, what harms is refused or taken back, what breaks is
survived, and a later process goes on where this one stopped."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptation.policy import Arm, Judgement
from adaptation.publisher import GateDecision
from adaptation.records import AdaptationStatus, GateReason, Outcome
from adaptation.samples import ValidationText, example_of
from adaptation.timing import Pieces, completed
from adaptation.trainer import UpdateReport
from adaptation.worker import Worker
from drafters.network.checkpoint import weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import Bench, bench, drafter, feedback, full_bench, vocabulary
from tests.adaptation.worlds import Clock

DRAFTED = 5
TOKEN = int(vocabulary()[0][DRAFTED])


def serve(tried: Bench, seeds: range, *, accepted: tuple[int, ...] = (1, 2), update: bool = True) -> None:
    """Queries whose answers are one token throughout, each with an engine step and a chance to update after it."""
    for seed in seeds:
        tried.observe(feedback, seed, token=TOKEN, accepted=accepted)
        if update:
            tried.update()
        tried.weights.between_steps()


def taught(folder: Path, **knobs: object) -> Bench:
    tried = full_bench(folder, **knobs)
    serve_until(tried, range(60), "published")
    assert tried.weights.origin > 0
    return tried


def serve_until(tried: Bench, seeds: range, kind: str) -> None:
    for seed in seeds:
        serve(tried, range(seed, seed + 1))
        if kind in tried.kinds():
            return
    raise AssertionError(f"{kind} never happened: {tried.kinds()}")


def later(folder: Path, **knobs: object) -> Bench:
    """A later process, which serves what the one before has left."""
    tried = full_bench(folder, **knobs)
    tried.learner.restore()
    tried.weights.between_steps()
    return tried


@torch.no_grad()
def spoil(tried: Bench, seed: int = 7) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in tried.weights.training.parameters():
        value.copy_(torch.randn(value.shape, generator=generator))
    head = tried.weights.training.lm_head.weight
    head.mul_(50)  # more than an update can mend
    head[DRAFTED] = 0.0


def reported_updates(tried: Bench, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Judgement, bool]]:
    """Of each judged update from now on, what the policy learns of it, and whether it was published."""
    reported: list[tuple[Judgement, bool]] = []
    ended = tried.policy.ended

    def listening(arm: Arm, signal: float, judgement: Judgement, seconds: float, *, published: bool) -> None:
        reported.append((judgement, published))
        ended(arm, signal, judgement, seconds, published=published)

    monkeypatch.setattr(tried.policy, "ended", listening)
    return reported


def test_what_the_texts_teach_is_published_and_served(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    serve(tried, range(32))
    published = [event for event in tried.events if event.kind == "published"]
    assert [event.version for event in published] == list(range(1, len(published) + 1))
    assert tried.weights.version == len(published)
    assert published[-1].numbers["candidate"] > published[-1].numbers["anchor"] + 1
    assert all(event.numbers["candidate"] > event.numbers["serving"] for event in published)
    assert not same(weights_of(tried.serving), weights_of(drafter()))
    assert tried.time.seconds > 0
    assert "rolled_back" not in tried.kinds()


def test_where_no_one_could_judge_nothing_is_trained(tmp_path: Path) -> None:
    tried = full_bench(tmp_path, gate_texts=100)
    serve(tried, range(12))
    assert tried.events == []
    assert tried.time.seconds == 0.0
    assert sum(tried.learner.training.num_updates.values()) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_bad_candidate_is_refused_and_forgotten(tmp_path: Path, seed: int) -> None:
    tried = taught(tmp_path, full_steps=2, step_texts=64, warm_up_steps=1, learning_rate=0.02)
    served, version = {name: value.clone() for name, value in weights_of(tried.serving).items()}, tried.weights.version
    tried.events.clear()
    spoil(tried, seed)
    serve(tried, range(100, 104), update=False)
    while not tried.update():
        serve(tried, range(104, 106), update=False)
    assert [(event.kind, event.reason) for event in tried.events] == [("refused", "worse_than_serving")]
    tried.weights.between_steps()
    assert tried.weights.version == version
    assert same(weights_of(tried.serving), served)
    assert same(weights_of(tried.weights.training), served)


def test_the_deployed_drafter_is_not_compared_with_itself(tmp_path: Path) -> None:
    tried = full_bench(tmp_path, policy="never")
    serve(tried, range(60))
    assert tried.events == []
    assert same(weights_of(tried.serving), weights_of(drafter()))
    assert tried.publisher.monitor.alarms["cusum"].state()["freedom"] == 0.0


def changed(tried: Bench, seeds: range) -> None:
    """Traffic of many words, after that of one; no one has judged an update on it yet."""
    serve(tried, seeds, update=False)
    for seed in seeds:
        tried.observe(feedback, seed)
        if "changed" in tried.kinds():
            return
    raise AssertionError("no one noticed")


def test_other_traffic_judges_by_itself(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    changed(tried, range(60))
    assert len(tried.learner.feedback.validation.texts) >= 4
    assert not tried.update()
    serve_until(tried, range(100, 160), "published")
    judged = next(event for event in tried.events if event.kind in ("published", "refused"))
    assert judged.numbers["sequences"] == 4


def test_each_update_answers_for_what_it_has_gained_itself(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    report, judgements = UpdateReport("full", "applied", 0.0), list[Judgement | None]()

    def updated(gain: float, reason: GateReason = "within_noise") -> float | None:
        decision = GateDecision(reason, 8, 2.0 * (1.0 + gain), 2.0, 2.0, 0.2, 0.25)
        judgement = tried.publisher.conclude(report, decision, seconds=0.0).judgement
        judgements.append(judgement)
        return None if judgement is None else judgement.gain - judgement.before

    assert updated(0.02) == pytest.approx(0.02)
    assert updated(0.06) == pytest.approx(0.04)
    errors = [(one.error, one.needed) for one in judgements if one is not None]
    assert errors == [pytest.approx((0.1, 0.125)), pytest.approx((math.hypot(0.1, 0.1), 0.125))]
    assert updated(0.10, "better") == pytest.approx(0.04)
    tried.weights.between_steps()
    assert updated(0.03) == pytest.approx(0.03)
    tried.publisher.traffic_changed()
    assert updated(0.05) is None
    assert updated(0.06) == pytest.approx(0.01)
    assert updated(-0.20) == pytest.approx(-0.26)
    assert updated(0.01) == pytest.approx(0.01)  # it had started over


def test_an_operator_can_take_back_pause_and_resume(tmp_path: Path) -> None:
    tried = taught(tmp_path)
    origin, version = tried.weights.origin, tried.weights.version
    restored = tried.learner.rollback()
    assert restored.origin < origin
    assert tried.weights.between_steps() == restored.version == version + 1
    tried.learner.pause()
    tried.events.clear()
    serve(tried, range(100, 130))
    assert tried.events == []
    tried.learner.resume()
    serve_until(tried, range(130, 190), "published")


def test_a_pause_outlasts_the_process(tmp_path: Path) -> None:
    for command, paused in (("pause", True), ("resume", False)):
        getattr(bench(tmp_path).learner, command)()
        assert later(tmp_path).learner.paused == paused


def test_nothing_is_trained_while_a_publish_is_on_its_way(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    for seed in range(40):
        tried.observe(feedback, seed, token=TOKEN)
        tried.update()
    assert tried.kinds().count("published") == 1
    assert tried.events[-1].kind == "published"


def test_an_update_that_is_not_finite_is_discarded(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    broken = feedback(0, token=TOKEN)
    broken.features[6:] = math.nan
    while not tried.events:
        tried.learner.observe(broken)
        tried.update()
    assert (tried.events[0].kind, tried.events[0].reason) == ("discarded", "loss_not_finite")
    assert same(weights_of(tried.weights.training), weights_of(drafter()))
    assert tried.buffers.take("full") == [], "it would break the next update too"


def test_an_idle_update_that_breaks_is_reported_and_not_tried_on_the_same_texts_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = full_bench(tmp_path, full_queries=100, idle_share=1.0, kept_refusals=2)
    serve(tried, range(16), update=False)
    for seed in range(4):
        text = example_of(feedback(seed))
        assert text is not None
        tried.buffers.replay.add(text, feedback(seed).query)
    for _ in range(3):
        assert tried.learner.work()
        tried.learner.abandon()
    assert [event.reason for event in tried.events] == ["interrupted"] * 3, "that was not in vain"

    def ends(outcome: Outcome) -> None:
        def update(*_: object, **__: object) -> Pieces[UpdateReport]:
            yield
            return UpdateReport("full", outcome, 0.0)

        monkeypatch.setattr(tried.learner.training, "update", update)

    ends("nothing_to_learn")
    for _ in range(5):
        tried.update()
    assert [event.reason for event in tried.events[3:]] == ["nothing_to_learn"] * 2
    tried.buffers.replay.num_added += 5
    ends("loss_not_finite")
    tried.update()
    assert tried.events[-1].reason == "loss_not_finite"
    assert not tried.buffers.replay


@pytest.mark.parametrize("stage", ["_update", "_conclude"])
def test_what_breaks_is_forgotten(tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full_bench(tmp_path)

    def breaks(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(tried.learner, stage, breaks)
        with pytest.raises(RuntimeError, match="on purpose"):
            serve(tried, range(20))
    spoil(tried)
    tried.learner.recover("RuntimeError")
    assert tried.kinds()[-1] == "failed"
    assert same(weights_of(tried.weights.training), weights_of(drafter()))
    assert not tried.buffers.replay
    serve_until(tried, range(40, 100), "published")


def test_a_later_process_goes_on(tmp_path: Path) -> None:
    before = taught(tmp_path)
    before.learner.save(training=True)
    after = later(tmp_path)
    assert after.weights.version == before.weights.version + 1
    assert after.weights.origin == before.weights.origin
    assert same(weights_of(after.serving), weights_of(before.serving))
    assert same(after.learner.training.trainer.tensors(), before.learner.training.trainer.tensors())
    assert after.learner._policy.state() == before.learner._policy.state()
    assert [(event.kind, event.reason) for event in after.events] == [("restored", "same_weights")]


def test_what_was_condemned_stays_so_in_a_later_process(tmp_path: Path) -> None:
    before = taught(tmp_path)
    bad = before.weights.origin
    before.learner.rollback()
    before.weights.between_steps()
    after = later(tmp_path)
    assert bad in after.weights.condemned
    assert same(weights_of(after.serving), weights_of(before.serving))


def test_the_deployed_drafter_served_again_has_a_version_in_a_later_process_too(tmp_path: Path) -> None:
    before = taught(tmp_path)
    while before.weights.latest.origin > 0:
        before.learner.rollback()
    before.weights.between_steps()
    after = later(tmp_path)
    assert after.weights.version == after.weights.newest > before.weights.version
    assert after.weights.origin == 0


def test_a_first_start_restores_nothing(tmp_path: Path) -> None:
    tried = later(tmp_path)
    assert (tried.events, tried.weights.version) == ([], 0)


def test_another_policy_starts_anew(tmp_path: Path) -> None:
    before = taught(tmp_path)
    before.learner.save(training=False)
    after = later(tmp_path, policy="bandit")
    assert after.events[0].reason == "same_weights"
    assert any("policy" in event.reason for event in after.events[1:])
    assert after.weights.version > 0


def test_queries_of_older_weights_say_nothing_about_the_ones_that_serve(tmp_path: Path) -> None:
    tried = taught(tmp_path)
    alarms = tried.publisher.monitor.alarms
    before = [alarm.state() for alarm in alarms.values()]
    for seed in range(300, 340):
        tried.learner.observe(feedback(seed, token=TOKEN, version=0))
    assert [alarm.state() for alarm in alarms.values()] == before


def taking(tried: Bench, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, seconds: float) -> None:
    """From here on this call takes so much from serving."""
    call = getattr(owner, name)

    def takes(*given: object, **named: object) -> object:
        tried.time._uncharged += seconds
        return call(*given, **named)

    monkeypatch.setattr(owner, name, takes)


def charges(tried: Bench, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is charged from here on, of what is no update."""
    charged: list[float] = []
    monkeypatch.setattr(tried.policy, "spent", lambda seconds: charged.append(seconds) if seconds else None)
    return charged


def test_each_text_that_is_collected_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = bench(tmp_path, made=False, policy="bandit", validation_share=0.0)
    charged = charges(tried, monkeypatch)
    taking(tried, monkeypatch, tried.learner._bootstrap, "add", 2.0)
    serve(tried, range(6), update=False)
    collected = 6 - len(tried.learner.feedback.validation.texts)
    for seed in range(6, 6 + collected):
        tried.learner.work()
        tried.learner.observe(feedback(seed, store=False))  # what was taken is charged with the next query
    assert charged == [2.0] * collected != []


def test_alarms_and_idle_updates_are_charged_when_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = taught(tmp_path, idle_share=1.0)
    charged = charges(tried, monkeypatch)
    taking(tried, monkeypatch, tried.publisher.evaluator, "scored", 2.0)
    serve(tried, range(100, 104), update=False)
    scored = len(tried.publisher.monitor.unscored)
    monkeypatch.setattr(tried.policy, "due", lambda signals: None)
    while tried.publisher.monitor.unscored or tried.publisher.monitor.scoring is not None:
        tried.learner.work()
        tried.learner.observe(feedback(1000, store=False))  # what was taken is charged with the next query
    assert charged == [2.0] * scored != []
    charged.clear()
    taking(tried, monkeypatch, tried.learner.training, "update", 3.0)
    tried.update()
    assert charged == [3.0]


def test_an_arm_pays_for_its_update_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full_bench(tmp_path)
    serve(tried, range(12), update=False)
    charged, paid = charges(tried, monkeypatch), list[float]()
    monkeypatch.setattr(tried.policy, "ended", lambda *given, **_: paid.append(given[-1]))
    taking(tried, monkeypatch, tried.publisher.distance, "_measure", 2.0)
    taking(tried, monkeypatch, tried.learner.training, "update", 3.0)
    seen(tried)
    assert tried.update()
    assert (charged, paid) == ([2.0], [3.0])


def test_weights_that_an_operator_brings_are_served_unjudged(tmp_path: Path) -> None:
    tried = bench(tmp_path, gate_alpha=1e-12)
    for seed in range(6):
        tried.observe(feedback, seed)
    brought = {name: value.clone() for name, value in weights_of(drafter(seed=5)).items()}
    assert tried.learner.adopt(brought) == 1
    assert tried.weights.between_steps() == 1
    assert same(weights_of(tried.serving), brought)
    assert same(weights_of(tried.weights.training), brought)
    assert [(event.kind, event.reason, event.version) for event in tried.events] == [("loaded", "operator", 1)]
    assert same(weights_of(later(tmp_path).serving), brought)


def test_it_rests_once_texts_could_judge_and_nothing_is_to_be_gained(tmp_path: Path) -> None:
    rests: dict[tuple[str, int], bool] = {}
    for policy in ("never", "full_only"):
        tried = full_bench(tmp_path / policy, policy=policy)
        for queries in (1, 60):
            serve(tried, range(queries))
            rests[policy, queries] = tried.learner.sampler.share == 1 / 32
    assert rests == {("never", 1): False, ("never", 60): True, ("full_only", 1): False, ("full_only", 60): False}


def test_it_rests_while_it_is_paused(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    rests: list[bool] = []
    for seed, act in enumerate((lambda: None, tried.learner.pause, tried.learner.resume)):
        act()
        serve(tried, range(seed, seed + 1))
        rests.append(tried.learner.sampler.share == 1 / 32)
    assert rests == [False, True, False]


@pytest.mark.parametrize(("store", "kinds"), [(True, {"changed"}), (False, set())])
def test_other_words_alone_are_other_traffic_unless_no_one_may_know_them(
    tmp_path: Path, store: bool, kinds: set[str]
) -> None:
    tried = full_bench(tmp_path, policy="never")
    serve(tried, range(60))
    for seed in range(12):  # answers of many tokens, accepted and held likely as the others were
        tried.observe(feedback, seed, store=store)
    assert {event.kind for event in tried.events} == kinds
    assert {event.reason for event in tried.events} <= {"other_words"}
    for seed in range(12):  # nor have they become usual where no one may know them
        tried.observe(feedback, seed)
    assert "other_words" in {event.reason for event in tried.events}


@pytest.mark.parametrize("reported", [{"answer": 3}, {"store": False}])
def test_it_rests_where_no_text_could_ever_judge_until_one_could(tmp_path: Path, reported: dict[str, Any]) -> None:
    tried = full_bench(tmp_path)
    rests: list[bool] = []
    for queries in (63, 1, 1):
        for seed in range(queries):
            tried.observe(feedback, seed, **reported)
        rests.append(tried.learner.sampler.share == 1 / 32)
    serve(tried, range(1))
    assert (rests, (tried.learner.sampler.share == 1 / 32)) == ([False, True, True], False)


def test_an_update_that_is_interrupted_says_nothing_of_its_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = full_bench(tmp_path)
    reported = reported_updates(tried, monkeypatch)
    serve(tried, range(40), update=False)
    heard, waiting = len(tried.buffers.replay), dict(tried.buffers.counts)
    assert waiting["full"] > 0
    for _ in range(2):
        assert tried.learner.work()
        tried.learner.abandon()
    assert [event.reason for event in tried.events] == ["interrupted"] * 2, "its samples wait again"
    assert reported == []
    assert tried.buffers.counts == waiting
    assert len(tried.buffers.replay) >= heard
    tried.update()
    assert tried.events[-1].kind in ("published", "refused")


def test_an_update_goes_on_as_far_as_the_ledger_covers_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second of serving beside each optimizer step, by a clock of its own."""
    tried, clock, covered = full_bench(tmp_path, full_steps=6), Clock(), 3.0
    serve(tried, range(40), update=False)
    step, losses = tried.trainer._step, list[dict[str, float]]()

    def stepping(*given: Any) -> dict[str, float]:
        tried.time.stepping()
        clock.now += 0.5
        losses.append(step(*given))
        tried.time.stepped("decode", 0.5)
        return losses[-1]

    monkeypatch.setattr(tried.time, "_clock", clock)
    monkeypatch.setattr(tried.time, "_cpu_clock", clock)
    monkeypatch.setattr(tried.time, "_covers", lambda taken: taken < covered * 0.5 * tried.time.taken_share)
    monkeypatch.setattr(tried.trainer, "_step", stepping)
    while tried.learner.work():
        pass
    assert len(losses) == 3
    assert tried.events == []
    tried.observe(feedback, 99, token=TOKEN)
    assert not tried.learner.work(), "queries are observed meanwhile"
    covered = 100.0
    while tried.learner._job is not None:
        assert tried.learner.work()
    assert len(losses) == 6
    assert tried.events[-1].kind in ("published", "refused")


def test_replays_between_the_pieces_of_a_judgement_do_not_change_it(tmp_path: Path) -> None:
    """Alarms score the served drafter on the same replica."""
    judged: list[list[tuple[str, float, float]]] = []
    text = example_of(feedback(99, token=TOKEN))
    assert text is not None
    for disturbs in (False, True):
        tried = taught(tmp_path / str(disturbs))
        serve(tried, range(100, 110), update=False)
        tried.events.clear()
        tried.publisher.monitor.unscored.clear()
        assert tried.learner.work()
        while tried.learner._job is not None:
            if disturbs:
                watched = ValidationText(10**6, text)
                completed(tried.publisher.evaluator.scored(watched, with_previous=True))
            tried.learner.work()
        judged.append([(event.kind, event.numbers["candidate"], event.numbers["serving"]) for event in tried.events])
    assert judged[0] == judged[1] != []


def test_weights_that_are_new_are_looked_at_closely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = taught(tmp_path)
    monkeypatch.setattr(type(tried.policy), "resting", property(lambda policy: True))
    seed = 1000
    seen: set[tuple[bool, bool]] = set()
    while (True, True) not in seen:
        on_probation = tried.publisher.monitor.on_probation
        serve(tried, range(seed, seed + 1))
        seen.add((not on_probation, (tried.learner.sampler.share == 1 / 32)))
        seed += 1
    assert seen == {(False, False), (True, True)}


def seen(tried: Bench) -> AdaptationStatus:
    worker = Worker(tried.learner, max_waiting=4)
    worker.inbox.num_dropped, worker.num_restarts = 3, 2
    worker.failures["observe"] = 1
    return tried.learner.status(worker)


def test_after_traffic_an_update_and_a_rollback(tmp_path: Path) -> None:
    tried = full_bench(tmp_path)
    token = int(vocabulary()[0][5])
    for seed in range(40):
        tried.observe(lambda seed, **reported: feedback(seed, token=token, **reported), seed)
        tried.update()
        tried.weights.between_steps()
    tried.learner.observe(feedback(99, rejected=0, accepted=()))
    assert seen(tried).served_tau == pytest.approx(2.5), "two and three tokens of two steps"
    tried.learner.rollback()
    before, status = seen(bench(tmp_path / "first", policy="bandit")), seen(tried)
    assert (before.policy, before.version, before.newest, before.paused) == ("bandit", 0, 0, False)
    assert (before.values, before.waiting) == ({"head": 0.0, "full": 0.0}, {"head": 0, "full": 0})
    assert (before.kl_to_anchor, before.balance_seconds) == (None, None)
    assert (before.queries_dropped, before.restarts, before.failures) == (3, 2, {"observe": 1})
    kinds = tried.kinds()
    assert status.publishes == kinds.count("published") > 0
    assert status.refusals == kinds.count("refused")
    assert (status.rollbacks, status.newest, status.version) == (1, tried.weights.newest, tried.weights.version)
    assert status.updates == {"full": kinds.count("published") + kinds.count("refused")}
    assert status.queries_observed == sum(status.decisions.values()) == 41
    assert status.excluded == {"nothing_to_learn": status.queries_excluded}
    assert status.snapshots == tuple(tried.weights.snapshots.versions)
    assert status.condemned == tuple(sorted(tried.weights.condemned)) != ()
    gains = [event.numbers["gain"] for event in tried.events if event.kind == "published"]
    assert status.predicted_gain == pytest.approx(sum(gains))
    assert status.served_tau is None
    assert status.kl_to_anchor is not None
    assert status.training_seconds == tried.time.seconds > 0
    assert [past.kind for past in status.events] == kinds[-50:]
