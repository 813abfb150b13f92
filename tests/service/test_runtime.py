import asyncio
import threading
import time
from concurrent.futures import CancelledError

import pytest

from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import EngineFailure, NotFound, NotReady, StartupError
from service.runtime import Runtime, ServedModel
from tests.service.scripted import CARD, TOKENIZER, Held, ScriptedAdaptation, ScriptedEngine, running, say, step


def ask(request_id: str = "a", n: int = 1) -> GenerationRequest:
    sampling = SamplingParams(seed=0, max_tokens=8)
    return GenerationRequest(request_id=request_id, prompt=(1, 2), sampling=sampling, n=n)


async def test_one_wakeup_serves_all_requests_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(say("x"))
    async with running(engine) as runtime:
        loop, calls = asyncio.get_running_loop(), 0
        original = loop.call_soon_threadsafe

        def counting(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += getattr(args[0], "__name__", "") == "_dispatch"
            return original(*args, **kwargs)

        engine.script = lambda request: []
        with runtime.generate(ask("a"), ask("b"), ask("c")) as generation:
            monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
            engine.deliver([step(request, 0, "x", "stop") for request in engine.submitted])
            assert [output.request_id async for output in generation] == ["a", "b", "c"]
        assert calls == 1


async def test_closing_early_aborts_and_drops_what_is_on_its_way() -> None:
    engine = Held("the", "w")
    async with running(engine) as runtime:
        with runtime.generate(ask("a")) as generation:
            assert (await anext(generation)).text == "the"
        assert engine.aborted == ["a"]
        engine.go_on.set()
        with pytest.raises(StopAsyncIteration):
            await anext(generation)


async def test_a_consumer_that_does_not_read_delays_no_one() -> None:
    async with running(ScriptedEngine(say(*["x"] * 50))) as runtime:
        with runtime.generate(ask("slow")) as slow:
            with runtime.generate(ask("quick")) as quick:
                assert len([output async for output in quick]) == 50
            assert len([output async for output in slow]) == 50


async def loading() -> tuple[Runtime, threading.Event]:
    """A runtime that loads until it is released."""
    release = threading.Event()

    def load() -> ServedModel:
        assert release.wait(10)
        return ServedModel(ScriptedEngine(say("x")), TOKENIZER, CARD)

    runtime = Runtime(load, max_waiting=4)
    await runtime.start()
    return runtime, release


async def test_requests_are_refused_while_loading_and_the_loop_stays_free() -> None:
    runtime, release = await loading()
    states: list[str] = [runtime.state]
    with pytest.raises(NotReady, match="loading"):
        runtime.generate(ask())
    with pytest.raises(NotReady, match="loading"):
        _ = runtime.card
    release.set()
    await runtime.wait_until_loaded()
    states.append(runtime.state)
    assert states == ["loading", "ready"]
    assert runtime.card == CARD
    await runtime.stop()


async def test_a_failed_load_is_reported_to_those_who_wait(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> ServedModel:
        raise StartupError("no such model")

    runtime = Runtime(load, max_waiting=4)
    await runtime.start()
    with pytest.raises(StartupError, match="no such model"):
        await runtime.wait_until_loaded()
    assert "Traceback" not in caplog.text
    assert runtime.state == "failed"
    with pytest.raises(EngineFailure):
        runtime.generate(ask())
    await runtime.stop()


async def test_stopping_while_loading_does_not_wait_for_the_load() -> None:
    runtime, release = await loading()
    await asyncio.sleep(0.02)
    began = time.monotonic()
    await runtime.drain(5)
    assert time.monotonic() - began < 1
    assert runtime.state == "draining"
    release.set()


async def test_a_dead_engine_fails_every_generation() -> None:
    engine = Held("the", "w")
    async with running(engine) as runtime:
        with runtime.generate(ask()) as generation:
            await anext(generation)
            engine.failure = RuntimeError("out of memory")
            engine.deliver([])
            with pytest.raises(EngineFailure, match="internal error"):
                await anext(generation)
        assert runtime.state == "failed"
        engine.go_on.set()


async def test_loop_lag_is_the_longest_wait_of_outputs_since_it_was_last_read() -> None:
    engine = ScriptedEngine(say("x"))
    async with running(engine) as runtime:
        time.sleep(0.2)
        await asyncio.sleep(0.02)
        assert runtime.max_loop_lag_seconds() == 0.0  # no one was served
        with runtime.generate(ask()) as generation:
            time.sleep(0.2)
            await anext(generation)
        assert 0.14 < runtime.max_loop_lag_seconds() < 10
        assert runtime.max_loop_lag_seconds() == 0.0


async def test_blocking_work_runs_beside_the_loop() -> None:
    async with running(ScriptedEngine(say("x"))) as runtime:
        assert await runtime.off_loop(threading.get_ident) != threading.get_ident()


async def test_learning_begins_with_the_engine_and_ends_after_it() -> None:
    engine, stopped_before = ScriptedEngine(say("x")), list[bool]()

    class Ending(ScriptedAdaptation):
        def stop(self) -> None:
            stopped_before.append(engine.stopped)
            super().stop()

    adaptation = Ending()
    async with running(engine, adaptation=adaptation):
        assert adaptation.asked == ["start"]
        assert engine.num_woken == 2  # for what an earlier process left, and by learning itself
    assert adaptation.asked == ["start", "stop"]
    assert stopped_before == [True]


async def test_learning_is_asked_beside_the_loop() -> None:
    adaptation = ScriptedAdaptation()
    async with running(ScriptedEngine(say("x")), adaptation=adaptation) as runtime:
        adaptation.threads.clear()
        assert await runtime.ask_adaptation(lambda control: control.rollback()) == 4
        assert threading.get_ident() not in adaptation.threads


async def test_an_answer_that_takes_long_keeps_no_tokenization_waiting() -> None:
    opened = threading.Event()
    async with running(ScriptedEngine(say("x")), adaptation=ScriptedAdaptation()) as runtime:
        asking = [asyncio.create_task(runtime.ask_adaptation(lambda control: opened.wait(10))) for _ in range(4)]
        await asyncio.sleep(0.02)
        assert await asyncio.wait_for(runtime.off_loop(lambda: "encoded"), 5) == "encoded"
        opened.set()
        assert await asyncio.gather(*asking) == [True] * 4


async def test_without_learning_there_is_no_one_to_ask() -> None:
    async with running(ScriptedEngine(say("x"))) as runtime:
        with pytest.raises(NotFound, match=r"adaptation\.enabled true"):
            await runtime.ask_adaptation(lambda control: control.status())


async def test_a_question_to_a_server_that_stops_is_given_up() -> None:
    adaptation = ScriptedAdaptation(CancelledError())
    async with running(ScriptedEngine(say("x")), adaptation=adaptation) as runtime:
        with pytest.raises(NotReady, match="being stopped"):
            await runtime.ask_adaptation(lambda control: control.status())
        await runtime.stop()
        with pytest.raises(NotReady, match="shutting down"):
            await runtime.ask_adaptation(lambda control: control.status())
