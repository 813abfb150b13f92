"""Chunks that say what each step did: for streams that ask, and for nobody else."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from service.engine.requests import GenerationRequest, SequenceOutput, StepTree
from tests.service.api.client import ASK, Body, client_of, error_of, events_of
from tests.service.scripted import TOKENIZER, ScriptedEngine, say, step

pytestmark = pytest.mark.anyio

TRACE = {"speculation": {"trace": True}}
FLOWER = "\N{CHERRY BLOSSOM}"
FLOWER_TOKENS = tuple(TOKENIZER.encode(FLOWER))


def tree(tokens: tuple[int, ...], path: tuple[int, ...]) -> StepTree:
    """A chain."""
    return StepTree(tokens, tuple(range(-1, len(tokens) - 1)), (0.123456,) * len(tokens), path)


def script(request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
    """Three steps; the second ends within a character, and the last is cut off by a stop."""
    a, b = TOKENIZER.encode("ab")
    asked = request.speculation.trace
    for index in range(request.n):
        outputs = [
            replace(step(request, index, "ab"), tree=tree((a, 5, 6), (0,))),
            replace(step(request, index, ""), token_ids=FLOWER_TOKENS[:2], tree=tree((), ())),
            replace(
                step(request, index, FLOWER, "stop"),
                token_ids=FLOWER_TOKENS[2:],
                tree=tree((*FLOWER_TOKENS[2:], b), (0, 1, 2)),
            ),
        ]
        for output in outputs:
            yield [output if asked else replace(output, tree=None)]


async def chunks_of(path: str, **fields: Any) -> list[Body]:
    body = {"model": "tiny", **({"messages": ASK["messages"]} if "chat" in path else {"prompt": "a"}), **fields}
    async with client_of(ScriptedEngine(script)) as client:
        return events_of(await client.post(path, json={**body, "stream": True}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_tells_of_its_step(path: str) -> None:
    chunks = await chunks_of(path, **TRACE)
    told = [choice["speculation"] for chunk in chunks for choice in chunk["choices"] if "speculation" in choice]
    assert [(one["accepted"], one["drafted"]) for one in told] == [(1, 3), (0, 0), (2, 3)]
    assert [one["texts"] for one in told] == [["a", "b"], ["", ""], ["", FLOWER]]
    assert told[0]["tree"] == {
        "texts": ["a", *(TOKENIZER.decode([token]) for token in (5, 6))],
        "parents": [-1, 0, 1],
        "survival": [0.1235] * 3,
        "path": [0],
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_nobody_else_is_told(path: str) -> None:
    traced, plain = await chunks_of(path, **TRACE), await chunks_of(path)
    assert not any("speculation" in choice for chunk in plain for choice in chunk["choices"])

    def text(chunks: list[Body]) -> str:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    assert text(traced) == text(plain) == "ab" + FLOWER


async def test_choices_are_told_apart() -> None:
    chunks = await chunks_of("/v1/chat/completions", n=2, **TRACE)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(text for one in mine for text in one.get("speculation", {}).get("texts", [])) == "ab" + FLOWER


@pytest.mark.parametrize(("stream", "trace", "asked"), [(True, True, True), (False, True, False), (True, False, False)])
async def test_the_engine_is_asked_only_for_streams(stream: bool, trace: bool, asked: bool) -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine) as client:
        await client.post("/v1/chat/completions", json={**ASK, "stream": stream, "speculation": {"trace": trace}})
    assert [request.speculation.trace for request in engine.submitted] == [asked]


async def test_the_switch_is_a_boolean() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post("/v1/chat/completions", json={**ASK, "speculation": {"trace": "yes"}})
    assert (response.status_code, error_of(response)["param"]) == (400, "speculation.trace")
