"""The engine: one text per request, whatever drafter, budget, chunk, company or shortage of slots it meets."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineOutput
from service.engine.launch import landed
from service.engine.measuring import check, measure_costs
from service.engine.requests import GenerationRequest, SamplingParams, SpeculationParams
from service.engine.rows import Scheduled
from service.engine.scheduler import StepBatch
from tests.service.engine.harness import (
    LIMITS,
    Generated,
    alone,
    ask,
    generate,
    greedy,
    request,
    sampled,
    tiny_engine,
    tiny_target,
    waiting_in,
    with_answers,
)
from tests.service.engine.test_drafting import decoding
from tests.tiny_models import EOS_ID, load, loaded_tiny, random_prompts, stock_tiny, tiny_model

TOKENS = 24
KINDS = (
    greedy(TOKENS),
    sampled(5, TOKENS),
    SamplingParams(seed=2**63 + 9, max_tokens=TOKENS, temperature=1.5, top_p=0.9, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=TOKENS, temperature=0.7, top_k=20, min_p=0.02, ignore_eos=True),
    SamplingParams(
        seed=4,
        max_tokens=TOKENS,
        presence_penalty=1.0,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
        logit_bias=((5, 2.0), (9, -100.0)),
        ignore_eos=True,
    ),
    SamplingParams(seed=6, max_tokens=TOKENS, temperature=0.0, repetition_penalty=1.2, min_tokens=5, ignore_eos=True),
)


def prompts(*lengths: int) -> list[list[int]]:
    return [next(random_prompts(1, length, seed=length)) for length in lengths]


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """One request of every kind, with its plain answer as prediction."""
    texts = prompts(1, 20, 64, 65, 130, 40)
    return with_answers([request(str(i), text, kind) for i, (text, kind) in enumerate(zip(texts, KINDS, strict=True))])


def texts_of(results: dict[tuple[str, int], Generated]) -> list[list[int]]:
    return [result.tokens for result in results.values()]


def plain(requests: Sequence[GenerationRequest]) -> list[list[int]]:
    return [list(one.prediction) for one in requests]


@pytest.mark.parametrize("budget", [1, 5, 12])
@pytest.mark.parametrize("drafter", ["none", "memory", "memory+random", "random"])
def test_company_drafter_and_budget_change_no_token(
    requests: list[GenerationRequest], drafter: str, budget: int
) -> None:
    results = generate(tiny_engine(drafter=drafter, policy=FixedBudget(budget)), *requests)
    assert texts_of(results) == plain(requests)
    assert (sum(result.accepted for result in results.values()) > 0) == (drafter != "none")


def test_requests_one_after_another_do_not_inherit_from_each_other(requests: list[GenerationRequest]) -> None:
    engine = tiny_engine()
    assert [texts_of(generate(engine, one))[0] for one in requests * 2] == plain(requests) * 2


def test_n_sequences_are_single_requests_with_following_seeds() -> None:
    (text,) = prompts(30)
    together = generate(tiny_engine(), request("three", text, sampled(7), n=3))
    single = [alone(sampled(7 + index), text) for index in range(3)]
    assert texts_of(together) == [one.tokens for one in single]
    assert len({tuple(one.tokens) for one in single}) == 3


def test_the_last_of_all_seeds_wraps_around() -> None:
    (text,) = prompts(10)
    together = generate(tiny_engine(), request("two", text, sampled(2**63 - 1, 8), n=2))
    assert together["two", 1].tokens == alone(sampled(-(2**63), 8), text).tokens


def test_a_text_continues_as_itself() -> None:
    """What was written so far may as well have been the prompt: noise knows absolute positions only."""
    (text,) = prompts(20)
    whole = alone(sampled(3, 30), text).tokens
    engine = tiny_engine(drafter="memory")
    assert alone(sampled(3, 18), text + whole[:12], engine).tokens == whole[12:]


@pytest.mark.parametrize("count", [1, 2, 17])
def test_max_tokens_is_met_exactly(count: int, requests: list[GenerationRequest]) -> None:
    short = [replace(one, sampling=replace(one.sampling, max_tokens=count)) for one in requests]
    results = generate(tiny_engine(), *short)
    assert texts_of(results) == [answer[:count] for answer in plain(requests)]
    assert {result.end.finish_reason for result in results.values()} == {"length"}


def long_answer() -> tuple[list[int], Generated]:
    """A prompt and a text that repeats no token early, so that every stop has one place."""
    (text,) = prompts(33)
    return text, alone(sampled(1, 40), text)


def drafted(text: list[int], whole: Generated, params: SamplingParams) -> Generated:
    """The same request with its answer drafted far beyond the stop."""
    engine = tiny_engine()
    result = generate(engine, request("drafted", text, params, prediction=whole.tokens))["drafted", 0]
    assert result.tokens == alone(params, text).tokens
    return result


def test_a_stop_string_inside_a_draft_ends_the_text() -> None:
    text, whole = long_answer()
    place = next(i for i in range(10, len(whole.text)) if "\ufffd" not in whole.text[i : i + 3])
    stop = whole.text[place : place + 3]
    result = drafted(text, whole, replace(sampled(1, 40), stop=("never there", stop)))
    assert result.text == whole.text[: whole.text.find(stop)]
    assert (result.end.finish_reason, result.end.stop_reason) == ("stop", stop)
    assert result.tokens == whole.tokens[: len(result.tokens)]
    assert len(result.tokens) < 40
    kept = drafted(text, whole, replace(sampled(1, 40), stop=(stop,), include_stop_str_in_output=True))
    assert kept.text == result.text + stop


@pytest.mark.parametrize("end", ["stop", "stop_token_ids", "max_tokens"])
def test_tokens_after_the_end_of_a_text_count_nowhere(end: str) -> None:
    """Not in a request's record, hence not in tau, nor in the steps' from which the budget learns."""
    text, whole = long_answer()
    place = next(i for i in range(10, len(whole.text)) if "\ufffd" not in whole.text[i : i + 3])
    given = {
        "stop": (whole.text[place : place + 3],),
        "stop_token_ids": frozenset({whole.tokens[20]}),
        "max_tokens": 17,
    }
    params = replace(sampled(1, 40), num_logprobs=0, **{end: given[end]})  # type: ignore[arg-type]
    engine, heard = tiny_engine(), Generated()
    ask(engine, request("cut", text, params, prediction=whole.tokens))
    emitted = accepted = 0
    while not engine.idle:
        report = engine.step()
        for output in report.outputs:
            heard.add(output)
        if report.stats is not None and report.stats.prompt_tokens == 0:
            emitted += report.stats.emitted_tokens
            accepted += report.stats.accepted_tokens
    assert heard.tokens == whole.tokens[: len(heard.tokens)] != whole.tokens
    assert [(one.token_id, one.top) for one in heard.logprobs] == [(token, ()) for token in heard.tokens]
    assert heard.accepted == accepted > 0
    assert len(heard.accepted_per_step) + accepted == emitted == len(heard.tokens) - 1, "one came from reading"


def biased_to_eos(max_tokens: int, bias: float = 4.0) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=max_tokens, logit_bias=((EOS_ID, bias),))


def test_eos_ends_the_text_and_is_not_shown() -> None:
    text, _ = long_answer()
    endless = alone(replace(biased_to_eos(60), ignore_eos=True), text)
    assert EOS_ID in endless.tokens
    assert len(endless.tokens) == 60
    result = drafted(text, endless, biased_to_eos(60))
    assert result.tokens == endless.tokens[: endless.tokens.index(EOS_ID) + 1]
    assert (result.end.finish_reason, result.end.stop_reason) == ("stop", None)
    assert endless.text.startswith(result.text)


def test_min_tokens_holds_eos_back() -> None:
    text, _ = long_answer()
    endless = alone(replace(biased_to_eos(60), ignore_eos=True), text)
    result = drafted(text, endless, replace(biased_to_eos(60, 30.0), min_tokens=9))
    assert EOS_ID not in result.tokens[:9]
    assert result.tokens[9:] == [EOS_ID]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_plain_decoding_and_of_transformers(temperature: float) -> None:
    (text,) = prompts(25)
    params = SamplingParams(
        seed=1, max_tokens=20, temperature=temperature, num_logprobs=3, ignore_eos=True, logit_bias=((7, 1.0),)
    )
    single = alone(params, text)
    result = generate(tiny_engine(), request("a", text, params, prediction=single.tokens))["a", 0]
    assert result.accepted > 0
    assert result.logprobs == single.logprobs
    with torch.inference_mode():
        logits = stock_tiny("llama")(torch.tensor([text + result.tokens])).logits[0, len(text) - 1 : -1]
    expected = logits.log_softmax(-1)
    for row, (shown, token) in enumerate(zip(result.logprobs, result.tokens, strict=True)):
        top = expected[row].topk(3)
        assert shown.token_id == token
        assert shown.logprob == pytest.approx(float(expected[row, token]), abs=1e-4)
        assert shown.rank == 1 + int((expected[row] > expected[row, token]).sum())
        assert [token_id for token_id, _ in shown.top] == top.indices.tolist()
        assert [value for _, value in shown.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_speculation_can_be_switched_off_per_request(requests: list[GenerationRequest]) -> None:
    off = [replace(one, speculation=SpeculationParams(enabled=i % 2 == 0)) for i, one in enumerate(requests)]
    results = list(generate(tiny_engine(), *off).values())
    assert [result.tokens for result in results] == plain(requests)
    for one, result in zip(off, results, strict=True):
        assert result.end.speculation is not None
        assert any(result.end.speculation.drafted_per_step) == one.speculation.enabled


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_bounds_its_own_trees(most: int, requests: list[GenerationRequest]) -> None:
    bounded = replace(requests[1], request_id="bounded", speculation=SpeculationParams(max_budget=most))
    results = generate(tiny_engine(), bounded, requests[1])
    mine, other = results["bounded", 0].end.speculation, results["1", 0].end.speculation
    assert mine is not None
    assert other is not None
    assert max(mine.drafted_per_step) <= most < max(other.drafted_per_step)
    assert results["bounded", 0].tokens == results["1", 0].tokens


def test_what_speculation_did_adds_up(requests: list[GenerationRequest]) -> None:
    """All tokens come from a verify, but for the first one of a prompt that is read before."""
    for one, result in zip(requests, generate(tiny_engine(), *requests).values(), strict=True):
        record, was_read = result.end.speculation, len(one.prompt) > 1
        assert record is not None
        assert len(record.accepted_per_step) == len(record.drafted_per_step) == result.num_outputs - was_read
        assert was_read + sum(accepted + 1 for accepted in record.accepted_per_step) == len(result.tokens) == TOKENS


def test_reading_again_emits_no_first_token() -> None:
    goes_on, comes_back = decoding(0), decoding(1)
    comes_back.num_computed, comes_back.first_token_seconds, comes_back.last_emit_seconds = 0, 1.0, 1.0
    batch = StepBatch([Scheduled.of(goes_on, 1), Scheduled.of(comes_back, len(comes_back.tokens))], [])
    assert len(landed(batch, [2, 0])) == 1, "the first token of one, the next one of the other"
    assert [one.num_pending for one in (goes_on, comes_back)] == [-1, 11], "launches count extend rows"


def test_abort_frees_everything_before_the_next_step(requests: list[GenerationRequest]) -> None:
    engine = tiny_engine(limits=replace(LIMITS, max_sequences=3))
    gone = replace(requests[4], request_id="gone", n=2)
    results = {(one.request_id, 0): Generated() for one in requests}
    for one in (requests[0], gone, *requests[1:]):
        ask(engine, one)
    for _ in range(4):
        engine.step()
    before = engine.slots.num_free
    report = engine.abort("gone")
    assert [output.finish_reason for output in report.outputs] == ["abort"] * 2
    assert [stats.finish_reason for stats in report.finished] == ["abort"] * 2
    assert engine.slots.num_free > before
    engine.assert_conserved()
    assert not [s for s in [*engine.scheduler.running, *waiting_in(engine.scheduler.queue)] if s.request is gone]
    while not engine.idle:
        for output in engine.step().outputs:
            assert output.request_id != "gone"
            results[output.request_id, 0].tokens += output.token_ids
    assert results["5", 0].tokens == plain(requests)[5]
    assert engine.slots.num_free == engine.slots.capacity


def test_aborting_the_unknown_does_nothing() -> None:
    assert tiny_engine().abort("no one") == EngineOutput([], [], None)


def test_a_request_without_any_possible_token_fails_alone(requests: list[GenerationRequest]) -> None:
    nothing = SamplingParams(seed=0, max_tokens=9, logit_bias=tuple((token, float("-inf")) for token in range(320)))
    results = generate(tiny_engine(), *requests, request("bad", [1, 2, 3], nothing))
    end = results.pop(("bad", 0)).end
    assert (end.finish_reason, end.token_ids) == ("error", ())
    assert end.error is not None
    assert texts_of(results) == plain(requests)


def test_a_sequence_with_nan_logits_fails_alone(
    requests: list[GenerationRequest], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A token whose embedding is not a number, in one prompt only."""
    bad_token = 310  # in no other prompt, so that the memory drafter does not propose it either
    engine = poisoned_engine(bad_token, tmp_path_factory)
    logprobs = replace(greedy(), num_logprobs=2)
    results = generate(engine, *requests, request("bad", [4, bad_token, 5], logprobs), request("root", [bad_token]))
    bad = results.pop(("bad", 0)).end
    assert (bad.finish_reason, bad.token_ids, bad.text, bad.logprobs) == ("error", (), "", ())
    assert results.pop(("root", 0)).end.finish_reason == "error"
    assert texts_of(results) == plain(requests)


def poisoned_engine(token: int, folders: pytest.TempPathFactory) -> Engine:
    loaded = load(tiny_model("llama", folders.mktemp("poisoned")))
    with torch.no_grad():
        loaded.model.get_parameter("model.embed_tokens.weight")[token] = torch.nan
    return tiny_engine(loaded, drafter="memory")


def test_a_text_fills_the_whole_context() -> None:
    limits = replace(LIMITS, max_model_len=100)
    for length in (99, 100 - TOKENS):
        (text,) = prompts(length)
        params = greedy(100 - length)
        results = generate(tiny_engine(limits=limits, num_slots=100 + 64 + 1), request("full", text, params))
        assert results["full", 0].tokens == alone(params, text).tokens


def test_a_step_says_what_it_did(requests: list[GenerationRequest]) -> None:
    engine = tiny_engine()
    for one in requests:
        ask(engine, one)
    totals = dict.fromkeys(("prompt_tokens", "emitted_tokens", "drafted_nodes", "accepted_tokens"), 0)
    finished = []
    while not engine.idle:
        report = engine.step()
        assert report.stats is not None
        assert engine.load.slots_used + engine.slots.num_free == engine.load.slots_total
        assert report.stats.accepted_tokens == sum(report.stats.accepted_per_sequence)
        assert min(report.stats.draft_seconds, report.stats.verify_seconds, report.stats.other_seconds) >= 0
        for name in totals:
            totals[name] += getattr(report.stats, name)
        finished += report.finished
    assert totals["prompt_tokens"] == sum(len(one.prompt) for one in requests[1:])
    assert totals["emitted_tokens"] == TOKENS * len(requests)
    assert 0 < totals["accepted_tokens"] < totals["drafted_nodes"]
    assert sorted(stats.prompt_tokens for stats in finished) == sorted(len(one.prompt) for one in requests)


def test_timings_follow_one_another(requests: list[GenerationRequest]) -> None:
    timings = generate(tiny_engine(), requests[4])["4", 0].end.timings
    assert timings is not None
    assert 0 <= timings.queue_seconds <= timings.first_token_seconds <= timings.total_seconds


# Building an engine and measuring its costs, also where memory holds one short sequence and no more.


@pytest.mark.parametrize(("max_model_len", "num_slots"), [(16, 81), (64, 129), (300, 365), (1024, 1089), (1024, 5000)])
def test_costs_are_measured_within_any_pool(max_model_len: int, num_slots: int) -> None:
    target = tiny_target(loaded_tiny("llama"), num_slots)
    assert check(target) == "exact"
    costs = measure_costs(target, replace(LIMITS, max_model_len=max_model_len))
    assert (costs.contexts < max_model_len).all()
    for context in (1, 100, 5000):
        seconds = costs.verify_seconds(np.arange(1.0, 100.0), context)
        assert np.isfinite(seconds).all()
        assert (seconds > 0).all()
