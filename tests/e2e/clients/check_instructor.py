"""instructor: models of pydantic by functions and by schemas, whole and in part. Usage: check_instructor.py BASE_URL"""

import asyncio
import sys
from typing import Annotated, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field


class Note(BaseModel):
    kind: Literal["question", "answer"]
    marks: Annotated[list[Literal[1, 20, 300]], Field(max_length=3)]


plain = OpenAI(base_url=sys.argv[1], api_key="unused")
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
    client = instructor.from_openai(AsyncOpenAI(base_url=sys.argv[1], api_key="unused"), mode=instructor.Mode.TOOLS)
    note, completion = await client.chat.completions.create_with_completion(**options, response_model=Note)
    assert isinstance(note, Note)
    assert completion.usage.completion_tokens > 0


def check_asynchronous() -> None:
    asyncio.run(asynchronous())


for check in (check_models, check_partial, check_asynchronous):
    check()
    print("ok", check.__name__)
