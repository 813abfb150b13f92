"""The official client, over the application itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from service.engine.requests import GenerationRequest, TokenLogprob
from tests.service.api.client import app_of, client_of, error_of, events_of
from tests.service.scripted import TOKENIZER, ScriptedEngine, runtime_of, say, step

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def official(engine: ScriptedEngine, *, key: str = "key") -> AsyncIterator[openai.AsyncOpenAI]:
    runtime = runtime_of(engine)
    app = app_of(runtime, api_keys=("key",))
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    async with app.router.lifespan_context(app), transport:
        await runtime.wait_until_loaded()
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=transport, max_retries=0)


async def test_chat_stream_helper() -> None:
    async with (
        official(ScriptedEngine(say("hello", " w"))) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello w"


async def test_completions_and_models() -> None:
    async with official(ScriptedEngine(say("hello", " w"))) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"])
        models = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
    assert [choice.text for choice in answer.choices] == ["hello w", "hello w"]
    assert models == ["tiny", "org/tiny"]


async def test_errors_arrive_as_the_clients_own() -> None:
    async with official(ScriptedEngine(say("x"))) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=MESSAGES, n=99)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="none", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
    async with official(ScriptedEngine(say("x")), key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_an_error_in_mid_stream_is_raised() -> None:
    async with official(ScriptedEngine(say("he", "llo", finish="error"))) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="could not finish"):
            async for _ in stream:
                pass


async def post(engine: ScriptedEngine, prompt: Any, **fields: Any) -> Any:
    async with client_of(engine) as client:
        return await client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})


def echo(request: GenerationRequest) -> Any:
    """Every sequence says its own prompt and number."""
    for index in range(request.n):
        yield [step(request, index, TOKENIZER.decode(request.prompt[1:]) + str(index), "length")]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("the", [TOKENIZER.encode("the", add_special_tokens=True)]),
        (["the", "w"], [TOKENIZER.encode(text, add_special_tokens=True) for text in ("the", "w")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ("<|im_end|>", [TOKENIZER.encode("<|im_end|>", add_special_tokens=True, control=True)]),
    ],
)
async def test_every_form_of_prompt(prompt: Any, expected: list[list[int]]) -> None:
    engine = ScriptedEngine(say("x"))
    body = (await post(engine, prompt)).json()
    assert [list(request.prompt) for request in engine.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_stand_in_the_order_of_prompts() -> None:
    body = (await post(ScriptedEngine(echo), ["a", "b"], n=2)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "a0"),
        (1, "a1"),
        (2, "b0"),
        (3, "b1"),
    ]
    events = events_of(await post(ScriptedEngine(echo), ["a", "b"], n=2, stream=True))
    spoken = {event["choices"][0]["index"]: event["choices"][0]["text"] for event in events}
    assert spoken == {0: "a0", 1: "a1", 2: "b0", 3: "b1"}


async def test_the_prompt_is_echoed_once() -> None:
    whole = (await post(ScriptedEngine(say("x", "y")), ["a", "b"], echo=True)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["axy", "bxy"]
    events = events_of(await post(ScriptedEngine(say("x", "y")), "a", echo=True, stream=True))
    assert [event["choices"][0]["text"] for event in events] == ["ax", "y"]


async def test_a_whole_answer() -> None:
    body = (await post(ScriptedEngine(say("he", "llo")), "the", return_token_ids=True, seed=-1)).json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["seed"], body["system_fingerprint"]) == ("text_completion", -1, "fp_tiny")
    prompt = TOKENIZER.encode("the", add_special_tokens=True)
    ids = TOKENIZER.encode("he") + TOKENIZER.encode("llo")
    assert body["choices"] == [
        {
            "index": 0,
            "text": "hello",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "prompt_token_ids": prompt,
        }
    ]
    assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


async def test_chunks() -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    *chunks, last = events_of(await post(ScriptedEngine(say("he", "llo")), "the", **fields))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("he", None), ("llo", "stop")]
    assert ["prompt_token_ids" in choice for choice in choices] == [True, False]
    assert [chunk["usage"] for chunk in chunks] == [None, None]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 2


async def test_logprobs_in_the_legacy_shape() -> None:
    the, w = TOKENIZER.encode("the")[0], TOKENIZER.encode("w")[0]

    def script(request: GenerationRequest) -> Any:
        for token_id, text, finish in ((the, "the", None), (w, "w", "stop")):
            spoken = step(request, 0, text, finish)
            logprobs = (TokenLogprob(token_id, -1.0, 2, ((w, -0.25), (token_id, -1.0))),)
            yield [type(spoken)(request.request_id, 0, spoken.token_ids, text, logprobs, spoken.finish_reason)]

    body = (await post(ScriptedEngine(script), "x", logprobs=2)).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["the", "w"],
        "token_logprobs": [-1.0, -1.0],
        "top_logprobs": [{"w": -0.25, "the": -1.0}, {"w": -0.25}],
        "text_offset": [0, 3],
    }
    events = events_of(await post(ScriptedEngine(script), "x", logprobs=2, stream=True))
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [3]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": None}, "prompt"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str | None) -> None:
    response = await post(ScriptedEngine(say("x")), **{"prompt": "x", **fields})
    if param is None:
        assert response.status_code == 200
    else:
        assert (response.status_code, error_of(response)["param"]) == (400, param)


async def test_a_drawn_seed_differs_between_prompts_and_a_given_one_does_not() -> None:
    engine = ScriptedEngine(say("x"))
    drawn = (await post(engine, ["a", "a"], n=2)).json()["seed"]
    await post(engine, ["a", "a"], n=2, seed=9)
    assert [request.sampling.seed for request in engine.submitted] == [drawn, (drawn + 2) % 2**63, 9, 9]
