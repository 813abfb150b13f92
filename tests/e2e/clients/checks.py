"""What the checks of clients share. Each is a script in an environment of its own; usage: check_CLIENT.py BASE_URL"""

import sys
from collections.abc import Callable
from typing import Annotated, Literal

from openai import OpenAI
from pydantic import BaseModel, Field

BASE_URL = sys.argv[1]


class Note(BaseModel):
    """A note."""

    kind: Literal["question", "answer"]
    marks: Annotated[list[Literal[1, 20, 300]], Field(max_length=3)]


def official() -> OpenAI:
    return OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0)


def model_name() -> str:
    return official().models.list().data[0].id


def run(*checks: Callable[[], None]) -> None:
    for check in checks:
        check()
        print("ok", check.__name__)
