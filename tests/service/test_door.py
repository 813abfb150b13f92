"""Who is let in: places are counted by what waits, and no client leaves less to others than it has."""

from contextlib import suppress

import pytest

from service.engine.requests import GenerationRequest, SamplingParams, Scope
from service.errors import InvalidRequest, QueueFull
from service.runtime import Runtime
from tests.service.scripted import CARD, ScriptedEngine, running, say

NUM_PLACES = 16


def ask(number: int, account: str, prompt: int = 2, n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(seed=0, max_tokens=8)
    scope = Scope(address=account)
    return GenerationRequest(request_id=f"{account}{number}", prompt=(1,) * prompt, sampling=sampling, n=n, scope=scope)


def admitted(runtime: Runtime, account: str, prompt: int = 2) -> int:
    """How many of sixteen bodies are let in."""
    count = 0
    with suppress(QueueFull):
        for count in range(NUM_PLACES + 1):
            runtime.generate(ask(count, account, prompt))
    return count


async def test_each_of_k_clients_gets_a_share_and_there_is_room_for_one_more() -> None:
    engine = ScriptedEngine(lambda request: [])
    engine.is_full = True
    async with running(engine, max_waiting=NUM_PLACES) as runtime:
        assert [admitted(runtime, account) for account in "abcd"] == [8, 4, 2, 1]
        with pytest.raises(QueueFull, match="would hold 9 of the queue's 16 places and leave 0 to others") as refusal:
            runtime.generate(ask(99, "a"))
        assert refusal.value.retry_after_seconds == 16
        runtime.generate(ask(0, "last"))
        with pytest.raises(QueueFull):
            runtime.generate(ask(0, "too late"))
        assert runtime.num_refused == 6


async def test_a_body_takes_a_place_for_each_context_of_prompts_until_its_last_sequence_has_started() -> None:
    engine, context = ScriptedEngine(lambda request: []), CARD.max_model_len
    large = [ask(number, "large", context - 1, n=8) for number in range(7)]
    async with running(engine, max_waiting=NUM_PLACES) as runtime:
        with runtime.generate(*large):
            engine.is_full = True
            assert admitted(runtime, "other") == 8, "what has started holds no place"
    async with running(engine, max_waiting=NUM_PLACES) as runtime:
        with runtime.generate(*large):
            assert admitted(runtime, "large") == 1
            assert admitted(runtime, "other") == 4
        assert admitted(runtime, "third") == 5, "its places came free when it was closed"


async def test_what_can_never_wait_is_refused_for_good() -> None:
    async with running(ScriptedEngine(lambda request: []), max_waiting=NUM_PLACES) as runtime:
        half = NUM_PLACES // 2 * CARD.max_model_len
        with pytest.raises(
            InvalidRequest, match=f"have {half + 8} tokens, and a client may have {half} waiting"
        ) as refusal:
            runtime.generate(*(ask(number, "a", CARD.max_model_len + 1) for number in range(8)))
        assert refusal.value.param == "prompt"


class Broken:
    """A count that fails."""

    def use(self, tokens: int) -> None:
        raise ValueError("no such month")

    def release(self) -> None: ...


async def test_tokens_that_cannot_be_counted_cost_no_text() -> None:
    engine = ScriptedEngine(say("a", "b"))
    async with running(engine, max_waiting=NUM_PLACES) as runtime:
        with runtime.generate(ask(0, "a"), meter=Broken()) as broken, runtime.generate(ask(1, "b")) as other:
            assert ["".join([one.text async for one in stream]) for stream in (broken, other)] == ["ab", "ab"]
    assert engine.guard.errors == {"limits": 2}
