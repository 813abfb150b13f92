"""instructor: models of pydantic by functions and by schemas, whole and in part."""

import asyncio

import instructor
from checks import BASE_URL, Note, official, run
from openai import AsyncOpenAI

plain = official()
model = plain.models.list().data[0].id
options = {"model": model, "messages": [{"role": "user", "content": "A note."}], "max_tokens": 200, "temperature": 0.0}
modes = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


def check_models() -> None:
    for mode in modes:
        client = instructor.from_openai(plain, mode=mode)
        note = client.chat.completions.create(**options, response_model=Note, max_retries=0)
        assert isinstance(note, Note), mode


def check_partial() -> None:
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(**options, response_model=Note)
    assert last.kind in ("question", "answer")


async def asynchronous() -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=BASE_URL, api_key="unused"), mode=instructor.Mode.TOOLS)
    note, completion = await client.chat.completions.create_with_completion(**options, response_model=Note)
    assert isinstance(note, Note)
    assert completion.usage.completion_tokens > 0


def check_asynchronous() -> None:
    asyncio.run(asynchronous())


run(check_models, check_partial, check_asynchronous)
