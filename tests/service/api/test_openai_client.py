"""The official client, over the application itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from tests.service.api.client import app_of
from tests.service.scripted import TOKENIZER, ScriptedEngine, runtime_of, say

pytestmark = pytest.mark.anyio

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def official(engine: ScriptedEngine, *, key: str = "key") -> AsyncIterator[openai.AsyncOpenAI]:
    runtime = runtime_of(engine)
    app = app_of(runtime, api_keys=("key",))
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    async with app.router.lifespan_context(app), transport:
        await runtime.wait_until_loaded()
        yield openai.AsyncOpenAI(base_url="http://test/v1", api_key=key, http_client=transport, max_retries=0)


async def test_chat() -> None:
    async with official(ScriptedEngine(say("hello", " w"))) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, prediction={"type": "content", "content": "hello"}
        )
    assert answer.choices[0].message.content == "hello w"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 1
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


async def test_chat_stream() -> None:
    async with official(ScriptedEngine(say("hello", " w"))) as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello w"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


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


async def test_logprobs_parse() -> None:
    async with official(ScriptedEngine(say("x"))) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=5)
    assert answer.choices[0].logprobs is None
    assert TOKENIZER.decode(TOKENIZER.encode("x")) == answer.choices[0].message.content
