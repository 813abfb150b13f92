"""Engine and learner put together: what is recorded is what was served, an operator's commands reach the engine, and
a later process goes on where an earlier one stopped."""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptation.records import Event, ReplicaStatus
from adaptation.weights import DrafterWeights
from drafters.feedback import QueryFeedback
from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.served import ServingNetwork
from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.drafter import load_network
from service.engine import accounting
from service.engine.budget import FixedBudget
from service.engine.drafting import DraftStage
from service.engine.stats import StepStats
from service.errors import InvalidRequest, StartupError
from service.learning.adaptive import Adaptive, build_adaptive, log_event
from tests.drafters.network.parts import computed, serves
from tests.service.bench.parts import save_two_layers, settings_for, varied_prompts
from tests.service.learning_parts import assembled, built, learning, requests, texts

PROMPTS = varied_prompts()[:4]
PATIENCE_SECONDS = 30.0


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(tmp_path_factory.mktemp("tiny"), drafter="specblock")


def idle(assembly: Assembly, folder: Path, nodes: int = 8) -> tuple[Adaptive, list[QueryFeedback]]:
    """One whose thread does not run, and what it is offered."""
    adaptive = built(assembly, folder, budget=FixedBudget(nodes))
    heard: list[QueryFeedback] = []
    adaptive.worker.offer = heard.append  # type: ignore[method-assign, assignment]
    return adaptive, heard


def test_weights_that_cannot_be_written_change_no_text_and_no_draft(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive, _ = idle(assembly, tmp_path / "one")
    other, _ = idle(assembly, tmp_path / "other")  # to compare with
    engine, weights = adaptive.engine, adaptive.learner.weights
    asked = [replace(one, store=False) for one in requests(PROMPTS, temperature=0.0, tokens=24)]

    def answers(one: Adaptive) -> list[tuple[object, ...]]:
        return [(answer.token_ids, answer.accepted_per_step) for answer in generate(one.engine, asked).answers]

    assert answers(adaptive) == answers(other)
    former = dict(weights.latest.weights)
    with torch.no_grad():
        for value in weights.training.parameters():
            value.add_(0.1)
    version = weights.publish({})
    set_vocabulary, failures = ServingNetwork._set_vocabulary, [ValueError("planted")]

    def broken(network: ServingNetwork, d2t: torch.Tensor) -> None:
        if failures:
            network.d2t.zero_()
            raise failures.pop()
        set_vocabulary(network, d2t)

    monkeypatch.setattr(ServingNetwork, "_set_vocabulary", broken)
    assert engine.step().stats is None
    assert (weights.version, engine.guard.errors) == (0, {"weights": 1})
    assert serves(adaptive.network, former)
    with monkeypatch.context() as patch:
        patch.setattr(DrafterWeights, "between_steps", lambda _: 0)  # as it is
        assert answers(adaptive) == answers(other)
    engine.step()
    assert weights.version == version
    assert serves(adaptive.network, weights.latest.weights)


def test_a_query_of_wrong_costs_is_not_learnt_from(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive, heard = idle(assembly, tmp_path)
    asked = requests(PROMPTS, temperature=0.0, tokens=24)
    charge, failures = accounting.charge, [ValueError("planted")]

    def broken(*args: Any) -> None:
        if failures:
            raise failures.pop()
        charge(*args)

    monkeypatch.setattr(accounting, "charge", broken)
    texts(adaptive.engine, asked)
    assert len(heard) < len(asked)
    texts(adaptive.engine, asked)
    assert all(feedback.query.seconds > 0 for feedback in heard)
    assert len(heard) >= len(asked)


def test_drafts_whose_loss_is_not_known_are_few(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in a hundred steps, and none once no one learns from them."""
    adaptive, _ = idle(assembly, tmp_path)
    asked = requests(PROMPTS[:1], temperature=0.0, tokens=64)
    learn, calls = DraftStage.learn, list[int]()

    def broken(stage: DraftStage, budget: Any, stats: StepStats, **how: bool) -> None:
        if stats.drafted_nodes:
            calls.append(stats.drafted_nodes)
            raise ValueError("planted")
        learn(stage, budget, stats, **how)

    monkeypatch.setattr(DraftStage, "learn", broken)
    for _ in range(3):
        texts(adaptive.engine, asked)
    assert len(calls) == 2


def test_what_is_recorded_is_what_was_served(assembly: Assembly, tmp_path: Path) -> None:
    adaptive, heard = idle(assembly, tmp_path)
    asked = requests(PROMPTS, temperature=0.0, tokens=24)
    answers = {prompt.prompt: text for prompt, text in zip(asked, texts(adaptive.engine, asked), strict=True)}
    assert len(heard) == len(asked)
    for feedback in heard:
        tokens, draft_labels = list(feedback.query.tokens), feedback.draft_labels
        prompt = next(prompt for prompt in answers if tuple(tokens[: len(prompt)]) == tuple(prompt))
        assert tuple(tokens[len(prompt) :]) == answers[prompt]
        assert (feedback.prompt, feedback.first) == (len(prompt), 0)
        assert feedback.top_ids[:, 0].tolist() == tokens[len(prompt) :]
        assert int(draft_labels.rejected.sum()) == len(feedback.query.accepted) > 0
        assert torch.equal(draft_labels.tokens, torch.tensor(tokens)[draft_labels.positions])
        drafted = adaptive.network.t2d[draft_labels.tokens]
        chances = adaptive.network.head(draft_labels.states).softmax(-1)
        spoken = chances.gather(1, drafted.clamp(min=0)[:, None])[:, 0] * (drafted >= 0)
        assert torch.allclose(draft_labels.chances, spoken, atol=1e-6)


def test_features_and_likeliest_tokens_do_not_depend_on_what_was_drafted(assembly: Assembly, tmp_path: Path) -> None:
    asked = requests(PROMPTS, temperature=1.0, tokens=24)
    (trees, with_trees), (none, without) = idle(assembly, tmp_path / "a"), idle(assembly, tmp_path / "b", nodes=0)
    assert texts(trees.engine, asked) == texts(none.engine, asked)
    by_text = {tuple(feedback.query.tokens): feedback for feedback in without}
    for feedback in with_trees:
        other = by_text[tuple(feedback.query.tokens)]
        assert torch.equal(feedback.features, other.features)
        assert torch.equal(feedback.top_ids, other.top_ids)
        assert torch.equal(feedback.top_logprobs, other.top_logprobs)


def test_who_asked_and_what_may_be_kept_arrives(assembly: Assembly, tmp_path: Path) -> None:
    adaptive, heard = idle(assembly, tmp_path)
    texts(adaptive.engine, requests(PROMPTS, temperature=0.5, tokens=6))
    assert sorted(feedback.query.client for feedback in heard) == ["client 0", "client 0", "client 1", "client 2"]
    assert {feedback.query.temperature for feedback in heard} == {0.5}


def test_an_operator_of_one_that_follows_is_sent_to_the_leader(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(assembly, tmp_path) as adaptive:
        adaptive.pause()
        following = ReplicaStatus(role="following", leader="another")
        monkeypatch.setattr(adaptive.replicas, "status", lambda: following)
        adaptive.resume()
        for command in (adaptive.pause, adaptive.resume, adaptive.rollback):
            with pytest.raises(InvalidRequest, match="another") as refusal:
                command()
            assert refusal.value.code == "not_leading"
        assert not adaptive.status().paused


def test_weights_that_wait_wake_the_engine(assembly: Assembly, tmp_path: Path) -> None:
    adaptive = built(assembly, tmp_path)
    woken: list[bool] = []
    adaptive.start(lambda: woken.append(adaptive.learner.weights.pending))
    adaptive.rollback()
    adaptive.stop()
    assert woken == [True]


def brought(assembly: Assembly, folder: Path, seed: int = 3) -> Path:
    """A drafter like the one that serves, with other weights."""
    network = load_network(Path(str(assembly.config.drafter_path)), assembly.loaded)
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in network.parameters():
            value.copy_(torch.randn(value.shape).to(torch.bfloat16))
    checkpoint.save(folder, network, target_identity=assembly.loaded.parts.identity, facts={}, own_head=True)
    return folder


def test_a_drafter_from_a_folder_is_served_with_the_bits_it_has(assembly: Assembly, tmp_path: Path) -> None:
    folder = brought(assembly, tmp_path / "brought")
    asked = requests(PROMPTS, temperature=0.0, tokens=12)
    with learning(assembly, tmp_path / "state", policy="never") as adaptive:
        before = texts(adaptive.engine, asked)
        assert adaptive.load_from_disk(folder) == 1
        assert texts(adaptive.engine, asked) == before
        assert adaptive.engine.drafter.version == 1
        status = adaptive.status()
    assert (status.version, status.origin, status.snapshots) == (1, 1, (1,))
    assert serves(adaptive.network, weights_of(load_network(folder, assembly.loaded)))


def test_weights_in_bf16_are_exchanged_too(tmp_path: Path) -> None:
    assembly = assembled(tmp_path, drafter="specblock", dtype="bfloat16")
    folder = brought(assembly, tmp_path / "brought")
    with learning(assembly, tmp_path / "state", policy="never") as adaptive:
        adaptive.load_from_disk(folder)
        adaptive.engine.step()
        assert serves(adaptive.network, weights_of(load_network(folder, assembly.loaded)))
        asked = requests(PROMPTS, temperature=1.0, tokens=12)
        assert texts(adaptive.engine, asked) == texts(assembly.engine(assembly.drafter("none")), asked)


def test_a_drafter_with_another_vocabulary_serves_from_it(assembly: Assembly, tmp_path: Path) -> None:
    network = load_network(Path(str(assembly.config.drafter_path)), assembly.loaded)
    network.set_vocabulary(torch.arange(64) + 1)
    checkpoint.save(tmp_path / "d", network, target_identity=assembly.loaded.parts.identity, facts={}, own_head=True)
    asked = requests(PROMPTS, temperature=1.0, tokens=12)
    with learning(assembly, tmp_path / "state", policy="never") as adaptive:
        assert adaptive.load_from_disk(tmp_path / "d") == 1
        adaptive.engine.step()
        assert torch.equal(adaptive.network.d2t, torch.arange(64) + 1)
        assert torch.equal(adaptive.network.t2d[1:65], torch.arange(64))
        assert int((adaptive.network.t2d >= 0).sum()) == 64
        assert texts(adaptive.engine, asked) == texts(assembly.engine(assembly.drafter("none")), asked)
        adaptive.rollback()
        adaptive.engine.step()
        assert torch.equal(adaptive.network.d2t, torch.arange(64))


def test_weights_that_are_not_finite_are_refused_and_change_nothing(assembly: Assembly, tmp_path: Path) -> None:
    network = load_network(Path(str(assembly.config.drafter_path)), assembly.loaded)
    with torch.no_grad():
        next(network.parameters())[0] = torch.nan
    checkpoint.save(tmp_path / "d", network, target_identity=assembly.loaded.parts.identity, facts={}, own_head=True)
    with learning(assembly, tmp_path / "state", policy="never") as adaptive:
        with pytest.raises(DrafterError, match="not finite"):
            adaptive.load_from_disk(tmp_path / "d")
        status = adaptive.status()
    assert (status.newest, status.snapshots, status.failures, status.events) == (0, (), {}, ())


def test_two_engines_of_one_assembly_learn_apart(assembly: Assembly, tmp_path: Path) -> None:
    assert assembly.weights is not None
    before = computed(assembly.weights.network)
    with learning(assembly, tmp_path / "state", policy="never") as adaptive:
        adaptive.load_from_disk(brought(assembly, tmp_path / "brought"))
        adaptive.engine.step()
    after = computed(assembly.weights.network)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that processes share")
def test_a_process_that_cannot_start_is_reported_and_stops_no_server(
    assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no memory")

    adaptive = built(assembly, tmp_path, train_in="process")
    process = adaptive.learner.training.process
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr("adaptation.process.subprocess.Popen", full)
        adaptive.start()
    try:
        assert "no memory" in caplog.text
        assert process.num_started == 0
        process.start()
        assert process.num_started == 1
    finally:
        adaptive.stop()


def test_a_drafter_without_weights_cannot_learn(tmp_path: Path) -> None:
    assembly = assemble(settings_for(save_two_layers(tmp_path)))
    with pytest.raises(StartupError, match="nothing to learn"):
        build_adaptive(assembly, folder=tmp_path / "state", emit=lambda _: None)


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (
            Event("published", 3, "better", {"candidate": 2.12345, "serving": 2.0}),
            "INFO",
            "learning: published (better), drafter version 3: candidate 2.123, serving 2",
        ),
        (Event("rolled_back", 4, "not_finite"), "WARNING", "learning: rolled back (not_finite), drafter version 4"),
        (
            Event("failed", 4, "update: ValueError: two\nlines"),
            "WARNING",
            "learning: failed (update: ValueError: two lines), drafter version 4",
        ),
    ],
)
def test_an_event_is_one_line(event: Event, level: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_event(event)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (level, line)
    reported = record.__dict__
    assert (reported["event"], reported["reason"], reported["numbers"]) == (event.kind, event.reason, event.numbers)
