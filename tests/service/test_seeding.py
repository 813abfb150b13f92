"""Bootstrap prompts are answered while no one asks, and make way for those who do."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Literal

import pytest

from adaptation.records import AdaptationStatus
from service import serve
from service.engine.requests import GenerationRequest, SequenceOutput
from service.runtime import Runtime, ServedModel
from service.serve import answer_bootstrap_prompts
from tests.service.scripted import CARD, STATUS, TOKENIZER, Script, ScriptedAdaptation, ScriptedEngine, say

SEEDS = ((1, 2), (3, 4), (5, 6))


class Phased(ScriptedAdaptation):
    def __init__(self, phase: Literal["collecting", "learning"]) -> None:
        super().__init__()
        self.phase = phase

    def status(self) -> AdaptationStatus:
        return replace(STATUS, phase=self.phase)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_IDLE_CHECK_SECONDS", 0.01)


@asynccontextmanager
async def seeded(engine: ScriptedEngine, adaptation: ScriptedAdaptation) -> AsyncIterator[Runtime]:
    runtime = Runtime(lambda: ServedModel(engine, TOKENIZER, CARD, adaptation, SEEDS), max_waiting=4)
    await runtime.start()
    yield runtime
    await runtime.stop()


def asked_of(engine: ScriptedEngine) -> list[tuple[int, ...]]:
    return [tuple(request.prompt) for request in engine.submitted]


async def test_all_are_answered_one_by_one() -> None:
    engine = ScriptedEngine(say("x"))
    async with seeded(engine, Phased("collecting")) as runtime:
        await answer_bootstrap_prompts(runtime)
        assert asked_of(engine) == list(SEEDS)
        assert all(request.store and request.scope.account for request in engine.submitted)
        assert runtime.num_open == 0


async def test_none_is_asked_where_nothing_is_made() -> None:
    engine = ScriptedEngine(say("x"))
    async with seeded(engine, Phased("learning")) as runtime:
        await answer_bootstrap_prompts(runtime)
        assert engine.submitted == []


async def test_a_users_request_breaks_one_off_and_it_is_asked_again() -> None:
    began, goes_on = threading.Event(), threading.Event()

    def slow(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        pieces = list(spoken(request))
        if not request.request_id.startswith("bootstrap"):
            yield from pieces
            return
        began.set()
        yield [replace(pieces[0][0], finish_reason=None)]
        goes_on.wait(10)
        yield [replace(pieces[0][0], finish_reason=None)]
        yield from pieces

    spoken: Script = say("x")
    engine = ScriptedEngine(slow)
    async with seeded(engine, Phased("collecting")) as runtime:
        answering = asyncio.create_task(answer_bootstrap_prompts(runtime))
        await asyncio.to_thread(began.wait, 10)
        mine = replace(engine.submitted[0], request_id="mine")
        with runtime.generate(mine) as stream:
            goes_on.set()
            while not engine.aborted:
                await asyncio.sleep(0.01)
            outputs = [output async for output in stream]
        await answering
    assert outputs[-1].finish_reason is not None
    assert engine.aborted[0] == "bootstrap-0"
    assert asked_of(engine).count(SEEDS[0]) >= 3  # broken off, the user's own, and again
