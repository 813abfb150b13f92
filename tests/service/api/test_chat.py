from typing import Any

from service.engine.requests import TokenLogprob
from tests.service.api.client import ASK, client_of, events_of, post
from tests.service.scripted import TOKENIZER, ScriptedEngine, say, step

HEAD = ("id", "created", "model", "system_fingerprint", "seed")
PROMPT = TOKENIZER.render_chat([{"role": "user", "content": "hello"}])
SPECULATIVE = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 3 / 7,
    "acceptance_histogram": [1, 1, 1, 0, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 7,
    "num_spec_tokens": 4,
    "drafter": "memory",
    "drafter_version": 7,
}
TIMINGS = {"queue_seconds": 0.25, "first_token_seconds": 0.5, "total_seconds": 1.5}


async def test_a_whole_answer() -> None:
    engine = ScriptedEngine(say("hello", " w"))
    body = (await post(engine, seed=5)).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    answer = {"role": "assistant", "content": "hello w", "refusal": None}
    choice = {"index": 0, "message": answer, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "fp_tiny",
        "seed": 5,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 2,
            "total_tokens": len(PROMPT) + 2,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 1,
                "rejected_prediction_tokens": 2,
            },
        },
        "metrics": {"speculative_decoding": SPECULATIVE, "timings": TIMINGS},
    }
    assert list(engine.submitted[0].prompt) == PROMPT


async def test_the_order_and_shape_of_chunks() -> None:
    events = events_of(await post(ScriptedEngine(say("he", "", "llo")), stream=True))
    assert len({tuple(event[key] for key in HEAD) for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)
    choices = [choice for event in events for choice in event["choices"]]
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "he"}, None),
        ({"content": "llo"}, None),
        ({}, "stop"),
    ]
    assert choices[-1]["stop_reason"] is None


async def test_usage_comes_last_and_is_null_before() -> None:
    options = {"include_usage": True}
    *chunks, last = events_of(await post(ScriptedEngine(say("he", "llo")), stream=True, stream_options=options))
    assert [chunk["usage"] for chunk in chunks] == [None] * 4
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 + len(TOKENIZER.encode("llo")) - 1
    assert last["metrics"] == {"speculative_decoding": SPECULATIVE, "timings": TIMINGS}


async def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(await post(ScriptedEngine(say("hello", " w")), stream=True, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 2, 2]
    assert {event["usage"]["prompt_tokens"] for event in events} == {len(PROMPT)}


async def test_token_ids_are_sent_even_without_text() -> None:
    def script(request: Any) -> Any:
        quiet = step(request, 0, "hello")
        yield [type(quiet)(request.request_id, 0, quiet.token_ids, "")]
        yield [step(request, 0, " w", "length")]

    events = events_of(await post(ScriptedEngine(script), stream=True, return_token_ids=True))
    assert events[0]["prompt_token_ids"] == PROMPT
    content = [event["choices"][0] for event in events[1:-1]]
    assert [choice["token_ids"] for choice in content] == [TOKENIZER.encode("hello"), TOKENIZER.encode(" w")]
    assert [choice["delta"]["content"] for choice in content] == ["", " w"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"

    body = (await post(ScriptedEngine(say("hello", " w")), return_token_ids=True)).json()
    assert body["prompt_token_ids"] == PROMPT
    assert body["choices"][0]["token_ids"] == TOKENIZER.encode("hello") + TOKENIZER.encode(" w")


async def test_n_choices() -> None:
    body = (await post(ScriptedEngine(say("he", "llo")), n=3)).json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (0, "hello"),
        (1, "hello"),
        (2, "hello"),
    ]
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 9
    events = events_of(await post(ScriptedEngine(say("he", "llo")), n=2, stream=True))
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
    assert texts == {0: "hello", 1: "hello"}
    assert [event["choices"][0]["delta"].get("role") for event in events].count("assistant") == 2


async def test_steps_one_by_one_when_asked_for() -> None:
    engine = ScriptedEngine(say("x"))
    body = (await post(engine, speculation={"enabled": True, "max_budget": 3, "detailed": True})).json()
    detailed = {**SPECULATIVE, "per_step_accepted": [2, 0, 1], "per_step_drafted": [4, 0, 3]}
    assert body["metrics"]["speculative_decoding"] == detailed
    assert (engine.submitted[0].speculation.enabled, engine.submitted[0].speculation.max_budget) == (True, 3)


async def test_logprobs() -> None:
    a, umlaut = TOKENIZER.encode("a")[0], TOKENIZER.encode("ö")[0]

    def script(request: Any) -> Any:
        spoken = step(request, 0, "a", "stop")
        logprobs = (TokenLogprob(a, -0.5, 1, ((a, -0.5), (umlaut, float("-inf")))),)
        yield [type(spoken)(request.request_id, 0, spoken.token_ids, "a", logprobs, "stop")]

    expected = {"token": "a", "logprob": -0.5, "bytes": [97]}
    other = {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]}
    content = [{**expected, "top_logprobs": [expected, other]}]
    engine = ScriptedEngine(script)
    body = (await post(engine, logprobs=True, top_logprobs=2)).json()
    assert body["choices"][0]["logprobs"] == {"content": content, "refusal": None}
    assert engine.submitted[0].sampling.num_logprobs == 2
    events = events_of(await post(ScriptedEngine(script), logprobs=True, top_logprobs=2, stream=True))
    assert events[1]["choices"][0]["logprobs"] == {"content": content, "refusal": None}


async def test_accept_is_not_negotiated() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post("/v1/chat/completions", json=ASK, headers={"accept": "text/event-stream"})
    assert response.json()["object"] == "chat.completion"
