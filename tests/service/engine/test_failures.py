"""An exception ends the request it belongs to: seven others keep the texts of plain decoding, no slot is lost, no token
is sent twice, and the engine goes on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters.protocol import Committed
from service.assembly import Assembly, assemble
from service.engine import accounting
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SpeculationParams
from service.engine.sampling import SamplingState, TokenHistory
from service.engine.sequence import Sequence as Running
from service.text.grammars import GrammarState
from tests.service.bench.parts import save_drafter, save_two_layers
from tests.service.engine.harness import (
    LIMITS,
    Generated,
    alone,
    ask,
    finish,
    generate,
    greedy,
    request,
    sampled,
    tiny_engine,
)
from tests.service.engine.test_engine import KINDS, TOKENS, prompts
from tests.service.engine.test_grammar import regex
from tests.service.test_assembly import settings

DRAFTERS = ("none", "memory+random")
NUM_BEFORE = 5
"""Tokens that the bad request has before it fails."""

Plant = Callable[[Engine, Running, pytest.MonkeyPatch], None]


class PlantedError(Exception):
    pass


def fails(*args: object, **kwargs: object) -> None:
    raise PlantedError("planted")


@pytest.fixture(scope="module")
def good() -> list[GenerationRequest]:
    """Seven requests of all kinds, each with its plain answer as prediction."""
    texts, kinds = prompts(1, 20, 64, 65, 130, 40, 33), [*KINDS, greedy(TOKENS)]
    answers = [alone(kind, text).tokens for text, kind in zip(texts, kinds, strict=True)]
    return [
        request(str(i), text, kind, prediction=answer)
        for i, (text, kind, answer) in enumerate(zip(texts, kinds, answers, strict=True))
    ]


@pytest.fixture(scope="module")
def bad() -> GenerationRequest:
    (text,) = prompts(25)
    params = replace(greedy(TOKENS), repetition_penalty=1.1)  # so that its state hears of tokens
    return request("bad", text, params, prediction=alone(params, text).tokens)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """A target with a SpecBlock drafter of random weights beside the memory."""
    root = tmp_path_factory.mktemp("trained")
    folder = save_two_layers(root / "model")
    drafter = save_drafter(root / "drafter", assemble(settings(folder)))
    return assemble(settings(folder, drafter_path=drafter, drafter="memory+specblock", budget_policy="fixed"))


def late(sequence: Running, function: Callable[..., object]) -> Callable[..., object]:
    """The function, which fails once the sequence has some tokens."""

    def called(*args: object, **kwargs: object) -> object:
        if sequence.num_generated >= NUM_BEFORE:
            fails()
        return function(*args, **kwargs)

    return called


class Anything(GrammarState):
    """A grammar that allows every text."""

    def __init__(self, failing: Callable[[], None]) -> None:
        self._failing = failing

    def extend(self, tokens: Sequence[int]) -> None:
        return

    def allows(self, path: Sequence[int], token: int) -> bool:
        self._failing()
        return True

    def forced(self, path: Sequence[int]) -> list[int]:
        self._failing()
        return []


def in_the_grammar(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    """Before verification: in the draft stage where there are drafts, else where the target's tokens are chosen."""
    sequence.sampling.grammar = Anything(lambda: None if sequence.num_generated < NUM_BEFORE else fails())


def in_the_sampling_table(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    """Its state spoils what is computed for all sequences of a step together."""
    history = sequence.sampling.history
    assert history is not None
    counts = type(history).extend

    def extend(some: TokenHistory, tokens: Sequence[int]) -> None:
        counts(some, tokens)
        if some is history and sequence.num_generated >= NUM_BEFORE:
            some.counts = torch.zeros(7)  # which cannot be stacked with the others' counts

    patch.setattr(TokenHistory, "extend", extend)


def in_the_drafters_commit(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    commit = engine.drafter.commit

    def checked(committed: Committed) -> None:
        commit(committed)
        if sequence.num_generated >= NUM_BEFORE and sequence.row in committed.rows.tolist():
            fails()

    patch.setattr(engine.drafter, "commit", checked)


def in_the_state(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    """When its tokens are appended, after they were committed."""
    extend = SamplingState.extend

    def checked(state: SamplingState, tokens: Sequence[int]) -> None:
        if state is sequence.sampling and sequence.num_generated >= NUM_BEFORE:
            fails()
        extend(state, tokens)

    patch.setattr(SamplingState, "extend", checked)


def in_the_detokenizer(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    detokenizer = sequence.text._detokenizer
    patch.setattr(detokenizer, "push", late(sequence, detokenizer.push))


def at_the_end_of_the_text(engine: Engine, sequence: Running, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sequence.text, "finish", fails)


PLANTS: tuple[Plant, ...] = (
    in_the_grammar,
    in_the_sampling_table,
    in_the_drafters_commit,
    in_the_state,
    in_the_detokenizer,
    at_the_end_of_the_text,
)


def check_the_others(
    engine: Engine, good: Sequence[GenerationRequest], results: dict[tuple[str, int], Generated]
) -> None:
    """Their texts are plain decoding's, and the engine has room for the next one."""
    assert [results[one.request_id, 0].tokens for one in good] == [list(one.prediction) for one in good]
    assert engine.scheduler.num_available == engine.slots.capacity
    again = generate(engine, replace(good[0], request_id="again"))
    assert again["again", 0].tokens == list(good[0].prediction)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[tuple[str, int], Generated]:
    """Slots are counted after every step, and one that gets an output after its last one fails."""
    results = {(one.request_id, index): Generated() for one in requests for index in range(one.n)}
    finish(engine, results)
    return results


def plant_at_start(engine: Engine, request: GenerationRequest, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a failure in a request's sequence once it has begun."""
    begin, stop = engine.scheduler._hooks

    def planted(sequence: Running) -> bool:
        began = begin(sequence)
        if sequence.request is request:
            plant(engine, sequence, monkeypatch)
        return began

    monkeypatch.setattr(engine.scheduler, "_hooks", (planted, stop))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("plant", PLANTS)
def test_one_of_eight_fails_alone(
    good: list[GenerationRequest],
    bad: GenerationRequest,
    plant: Plant,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = tiny_engine(drafter=drafter, limits=replace(LIMITS, prefix_cache=True))
    for one in (*good[:4], bad, *good[4:]):
        ask(engine, one)
    plant_at_start(engine, bad, plant, monkeypatch)
    results = run(engine, [*good, bad])
    failed = results.pop(("bad", 0))
    check_the_others(engine, good, results)
    assert (failed.end.finish_reason, failed.end.text, failed.end.token_ids) == ("error", "", ())
    assert failed.tokens == list(bad.prediction)[: len(failed.tokens)]
    assert (failed.end.error or "").startswith("Request bad failed in the engine (")
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in lines] == ["request bad failed"]
    assert lines[0].exc_info is not None


@pytest.mark.parametrize("plant", PLANTS)
def test_a_trained_drafter_goes_on(trained: Assembly, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps entries of its own under the target's slots."""
    engine, texts = trained.engine(), prompts(1, 20, 64, 65, 70, 40, 33, 25)
    kinds = [*(sampled(i, TOKENS) for i in range(7)), replace(greedy(TOKENS), repetition_penalty=1.1)]
    asked = [request(str(i), text, kind) for i, (text, kind) in enumerate(zip(texts, kinds, strict=True))]
    without = SpeculationParams(enabled=False)
    alone = [replace(one, speculation=without, store=False) for one in asked]  # else drafts would be whole answers
    answers = [generate(engine, one)[one.request_id, 0].tokens for one in alone]
    for one in asked:
        ask(engine, one)
    plant_at_start(engine, asked[-1], plant, monkeypatch)
    results = run(engine, asked)
    assert results[asked[-1].request_id, 0].end.finish_reason == "error"
    assert [results[one.request_id, 0].tokens for one in asked[:-1]] == answers[:-1]
    assert sum(results[one.request_id, 0].accepted for one in asked[:-1]) > 0


def test_a_request_that_cannot_begin_fails_alone(
    good: list[GenerationRequest], bad: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, grammar = tiny_engine(), regex("[a-z]*")
    monkeypatch.setattr(grammar, "begin", fails)
    for one in (*good[:4], replace(bad, n=2, grammar=grammar), *good[4:]):
        ask(engine, one)
    results = {(one.request_id, 0): Generated() for one in (*good, bad)} | {("bad", 1): Generated()}
    finish(engine, results)
    assert [results.pop(("bad", index)).end.finish_reason for index in (0, 1)] == ["error", "error"]
    check_the_others(engine, good, results)


def test_an_engine_without_work_reports_a_request_that_cannot_begin(
    bad: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, grammar = tiny_engine(), regex("[a-z]*")
    monkeypatch.setattr(grammar, "begin", fails)
    ask(engine, replace(bad, grammar=grammar))
    (output,) = [output for _ in range(2) for output in engine.step().outputs]
    assert (output.request_id, output.finish_reason) == ("bad", "error")
    assert engine.idle


def failing_at(steps: Sequence[int], function: Callable[..., object]) -> Callable[..., object]:
    """The function, which fails at these calls, counted from 0."""
    calls = iter(range(1_000_000))

    def called(*args: object, **kwargs: object) -> object:
        result = function(*args, **kwargs)
        if next(calls) in steps:
            fails()
        return result

    return called


STAGES: tuple[tuple[Callable[[Engine], object], str], ...] = (
    (lambda engine: engine.drafter, "start"),
    (lambda engine: engine.drafter, "grow"),
    (lambda engine: engine.target, "forward"),
    (lambda engine: engine._launcher._verify_stage, "verify"),
    (lambda engine: engine.drafter, "commit"),
)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("owner", "name"), STAGES)
def test_a_step_that_fails_as_a_whole_is_repeated_without_drafts(
    good: list[GenerationRequest],
    owner: Callable[[Engine], object],
    name: str,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = tiny_engine(drafter=drafter)
    place, steps = owner(engine), (0,) if name == "start" else (1, 3)
    monkeypatch.setattr(place, name, failing_at(steps, getattr(place, name)))
    results = generate(engine, *good)
    check_the_others(engine, good, results)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * len(steps) or drafter == "none"
    assert (sum(one.accepted for one in results.values()) > 0) == (drafter != "none")


def test_what_is_too_much_for_one_step_runs_in_halves(
    good: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    forward, most = engine.target.forward, 3

    def small_only(rows, *args, **how):  # type: ignore[no-untyped-def]
        if rows.completing.shape[0] > most:
            fails()
        return forward(rows, *args, **how)

    monkeypatch.setattr(engine.target, "forward", small_only)
    results = generate(engine, *good)
    check_the_others(engine, good, results)


def test_scarce_slots_and_a_failing_request(
    good: list[GenerationRequest], bad: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are repeated in parts between preemptions."""
    engine = tiny_engine(drafter="memory", num_slots=170 + 64 + 1, limits=replace(LIMITS, max_model_len=170))
    for one in (bad, *good):
        ask(engine, one)
    plant_at_start(engine, bad, in_the_grammar, monkeypatch)
    results = run(engine, [*good, bad])
    assert results.pop(("bad", 0)).end.finish_reason == "error"
    check_the_others(engine, good, results)


def test_an_abort_between_the_parts_of_a_step(
    good: list[GenerationRequest], bad: GenerationRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(drafter="memory")
    for one in (bad, *good):
        ask(engine, one)
    plant_at_start(engine, bad, in_the_grammar, monkeypatch)
    results = {(one.request_id, 0): Generated() for one in (bad, *good)}
    while not engine._recovery.parts:
        for output in engine.step().outputs:
            results[output.request_id, 0].add(output)
    engine.abort("bad")
    gone = good[-1]
    engine.abort(gone.request_id)
    finish(engine, results)
    assert results[gone.request_id, 0].last is None
    check_the_others(engine, good[:-1], results)


def test_outputs_leave_before_the_books_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, order = tiny_engine(), list[str]()
    keep = accounting.StepAccounting.keep

    def noted(*args: Any) -> Any:
        order.append("books")
        return keep(*args)

    monkeypatch.setattr(accounting.StepAccounting, "keep", noted)
    ask(engine, request("a", [1, 2, 3], greedy(4)))
    while not engine.idle:
        engine.step(lambda outputs: order.append("outputs"))
    assert order[:2] == ["outputs", "books"]
    assert order.count("outputs") == order.count("books")


def steps_until_idle(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def test_a_failure_that_is_no_requests_own_ends_the_engine(
    good: list[GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine()
    for one in good:
        ask(engine, one)
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(engine.target, "forward", fails)
    with pytest.raises(PlantedError):
        steps_until_idle(engine)
    assert len(engine.scheduler.running) == len(good) - 1, "the first one that was alone in a step has ended"
