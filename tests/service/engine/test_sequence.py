from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, SequenceOutput, SpeculationParams, TokenLogprob
from service.engine.sequence import TextStream
from service.text.tokenizer import ChatTokenizer
from tests.service.engine.harness import LIMITS, alone, ask, greedy, request, sampled, tiny_engine
from tests.service.text.tiny_tokenizer import tiny_tokenizer
from tests.tiny_models import random_prompts, stock_tiny

TOKENIZER = ChatTokenizer(tiny_tokenizer())

few_letters = st.text("aboä", max_size=24)
stops = st.lists(st.text("aboä", min_size=1, max_size=4), max_size=4).map(tuple)


def stream(stop: tuple[str, ...], *, include_stop: bool = False, min_tokens: int = 0) -> TextStream:
    params = SamplingParams(
        seed=0, max_tokens=99, stop=stop, include_stop_str_in_output=include_stop, min_tokens=min_tokens
    )
    return TextStream(TOKENIZER.detokenizer(True), params)


def run(text_stream: TextStream, ids: list[int], *, take_every: int = 1) -> tuple[list[str], str | None]:
    """What is shown, piece by piece, and the stop string that ended it."""
    shown, stopped_by = [], None
    for number, token_id in enumerate(ids):
        stopped_by = text_stream.push(token_id)
        if stopped_by is not None:
            break
        if number % take_every == 0:
            shown.append(text_stream.take())
    return [*shown, text_stream.take(), text_stream.finish()], stopped_by


def cut_at_first_stop(text: str, stop: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The definition, character by character: the stop string that ends first, of those the longest."""
    for end in range(len(text) + 1):
        if ending := [candidate for candidate in stop if text[:end].endswith(candidate)]:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, None


@given(few_letters, stops, st.booleans(), st.integers(1, 4))
@example("abab", ("ab", "b"), False, 1)
@example("aob", ("aobo", "ob"), False, 1)
def test_the_pieces_join_to_the_text_up_to_the_first_stop(
    text: str, stop: tuple[str, ...], include_stop: bool, take_every: int
) -> None:
    shown, stopped_by = run(stream(stop, include_stop=include_stop), TOKENIZER.encode(text), take_every=take_every)
    assert ("".join(shown), stopped_by) == cut_at_first_stop(text, stop, include_stop)


@given(few_letters, stops)
def test_what_is_shown_can_never_be_taken_back(text: str, stop: tuple[str, ...]) -> None:
    final, _ = cut_at_first_stop(text, stop, include_stop=False)
    shown, _ = run(stream(stop), TOKENIZER.encode(text))
    so_far = ""
    for piece in shown:
        so_far += piece
        assert final.startswith(so_far)


@given(few_letters, stops)
def test_nothing_is_held_back_without_need(text: str, stop: tuple[str, ...]) -> None:
    text_stream, whole = stream(stop), ""
    detokenizer = TOKENIZER.detokenizer(True)
    for token_id in TOKENIZER.encode(text):
        whole += detokenizer.push(token_id)
        if text_stream.push(token_id) is not None:
            return
        text_stream.take()
        held = text_stream._pending
        assert whole.endswith(held)
        assert held == "" or any(candidate.startswith(held) for candidate in stop)


@given(few_letters, st.text("aboä", min_size=1, max_size=3), st.integers(0, 8))
def test_stop_strings_that_end_in_the_first_min_tokens_are_ignored(text: str, stop: str, min_tokens: int) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = TOKENIZER.detokenizer(True)
    free = len("".join(detokenizer.push(token_id) for token_id in ids[:min_tokens]))
    ends = [end for end in range(free + 1, len(text) + 1) if text[:end].endswith(stop)]
    expected = text[: ends[0] - len(stop)] if ends and len(ids) > min_tokens else text
    text_stream = stream((stop,), min_tokens=min_tokens)
    assert "".join(run(text_stream, ids, take_every=1000)[0]) == expected


@pytest.mark.parametrize(("include_stop", "expected"), [(False, "hello w"), (True, "hello wthe")])
def test_a_stop_string_inside_of_a_token_and_across_tokens(include_stop: bool, expected: str) -> None:
    ids = [*TOKENIZER.encode("hello w"), *TOKENIZER.encode("t"), *TOKENIZER.encode("he"), *TOKENIZER.encode("re")]
    shown, stopped_by = run(stream(("the",), include_stop=include_stop), ids)
    assert ("".join(shown), stopped_by) == (expected, "the")
    assert run(stream(("ell",)), TOKENIZER.encode("hello")) == (["h", ""], "ell")


# Requests that ask are informed of every tree that was verified for them, and get the same text.

TRACE = SpeculationParams(trace=True)


def outputs_of(*requests: GenerationRequest) -> dict[str, list[SequenceOutput]]:
    engine = tiny_engine(drafter="memory")
    for one in requests:
        ask(engine, one)
    outputs: dict[str, list[SequenceOutput]] = {one.request_id: [] for one in requests}
    while not engine.idle:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Greedy and sampled ones in turn, whose answers are predicted, but for every seventh token."""
    asked = []
    for i, text in enumerate(random_prompts(4, 20)):
        params = sampled(i) if i % 2 else greedy()
        answer = alone(params, text).tokens
        predicted = [token if place % 7 else 0 for place, token in enumerate(answer)]
        asked.append(request(str(i), text, params, prediction=predicted))
    return asked


def test_the_trees_account_for_every_token(requests: list[GenerationRequest]) -> None:
    for outputs in outputs_of(*(replace(one, speculation=TRACE) for one in requests)).values():
        trees = [output.tree for output in outputs if output.tree is not None]
        assert len(trees) == len(outputs)
        for output, tree in zip(outputs, trees, strict=True):
            above = [-1, *tree.path]
            assert [tree.parents[place] for place in tree.path] == above[: len(tree.path)]
            assert [tree.tokens[place] for place in tree.path] == list(output.token_ids[: len(tree.path)])
            assert all(parent < place for place, parent in enumerate(tree.parents))
            assert len(tree.survival) == len(tree.tokens)
        record = outputs[-1].speculation
        assert record is not None
        assert [len(tree.path) for tree in trees[1:]] == list(record.accepted_per_step)
        assert [len(tree.tokens) for tree in trees[1:]] == list(record.drafted_per_step)
        assert 0 < sum(record.accepted_per_step) < sum(record.drafted_per_step)


def test_reports_change_no_token(requests: list[GenerationRequest]) -> None:
    traced = outputs_of(*(replace(one, speculation=TRACE) if i < 2 else one for i, one in enumerate(requests)))
    plain = outputs_of(*requests)
    for name, outputs in plain.items():
        reported = traced[name]  # in other steps, maybe: what is shown is drafted from the text alone
        assert sum((output.token_ids for output in reported), ()) == sum((output.token_ids for output in outputs), ())
        assert "".join(output.text for output in reported) == "".join(output.text for output in outputs)
        assert {output.tree for output in outputs} == {None}
    assert {output.tree for output in traced["3"]} == {None}


# Log-probabilities of prompts are those of the plain model, however a prompt is read and whatever runs beside it.

FAMILY = "llama"


def scores_of(engine: Engine, *asked: GenerationRequest) -> dict[tuple[str, int], tuple[TokenLogprob, ...]]:
    for one in asked:
        ask(engine, one)
    found: dict[tuple[str, int], tuple[TokenLogprob, ...]] = {}
    while not engine.idle:
        for output in engine.step().outputs:
            assert output.error is None
            if output.prompt_logprobs:
                assert (output.request_id, output.index) not in found
                found[output.request_id, output.index] = output.prompt_logprobs
    engine.assert_conserved()
    return found


def scored(name: str, prompt: list[int], count: int = 2, *, n: int = 1) -> GenerationRequest:
    params = replace(greedy(3), num_logprobs=count)
    return replace(request(name, prompt, params), scores_prompt=True, n=n)


@pytest.mark.parametrize("chunk", [4, 7, 256])
def test_they_are_those_of_the_plain_model(chunk: int) -> None:
    prompts = list(random_prompts(3, 23))
    engine = tiny_engine(FAMILY, limits=replace(LIMITS, prefill_chunk=chunk))
    beside = request("beside", prompts[2], sampled(5, 40))
    found = scores_of(engine, beside, *(scored(str(number), prompt, n=2) for number, prompt in enumerate(prompts[:2])))
    assert found.keys() == {(str(number), index) for number in range(2) for index in range(2)}
    for (name, _), scores in found.items():
        prompt = torch.tensor([prompts[int(name)]])
        with torch.no_grad():
            expected = stock_tiny(FAMILY)(prompt).logits[0].float().log_softmax(-1)
        assert [score.token_id for score in scores] == prompt[0, 1:].tolist()
        for place, score in enumerate(scores):
            assert score.logprob == pytest.approx(float(expected[place, score.token_id]), abs=1e-3)
            top = expected[place].topk(2)
            assert [token for token, _ in score.top] == top.indices.tolist()


def test_a_known_prompt_is_read_again() -> None:
    (prompt,) = random_prompts(1, 30)
    engine = tiny_engine(FAMILY, limits=replace(LIMITS, prefill_chunk=8))
    scores_of(engine, request("first", prompt, greedy(3)))
    (again,) = scores_of(engine, scored("again", prompt)).values()
    (once_more,) = scores_of(engine, scored("again", prompt)).values()
    assert again == once_more
    assert len(again) == 29


def test_a_prompt_of_one_token_has_none() -> None:
    assert scores_of(tiny_engine(FAMILY), scored("one", [5])) == {}
