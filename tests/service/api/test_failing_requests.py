"""One of eight requests fails in a real engine: its answer is an error that names it, the others have their texts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from service.engine.sequence import TextStream
from service.engine.thread import EngineThread
from service.runtime import Runtime, ServedModel
from service.text.grammars import Grammar, GrammarState
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import app_of, client_for, events_of
from tests.service.engine.harness import alone, greedy, sampled, tiny_engine
from tests.service.scripted import CARD
from tests.tiny_models import loaded_tiny, random_prompts

TOKENS = 16
PROMPTS = list(random_prompts(8, 20))
STOP = "\N{SNOWMAN} never written"
Body = dict[str, Any]


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    loaded, thread = loaded_tiny("llama"), EngineThread(tiny_engine(drafter="memory"))
    card = replace(CARD, max_model_len=512, vocab_size=320)
    runtime = Runtime(lambda: ServedModel(thread, ChatTokenizer(loaded.tokenizer), card), max_waiting=16)
    app = app_of(runtime)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        yield client
    assert thread.failure is None


def ask(number: int, **fields: object) -> Body:
    """Every second one at a temperature above 0."""
    sampling = {"temperature": number % 2, "seed": number, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": "tiny", "prompt": PROMPTS[number], "return_token_ids": True, **sampling, **fields}


def plain(number: int) -> list[int]:
    return alone(sampled(number, TOKENS) if number % 2 else greedy(TOKENS), PROMPTS[number]).tokens


async def answers(client: httpx2.AsyncClient, bodies: Sequence[Body]) -> list[httpx2.Response]:
    return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))


def breaks(*args: object) -> None:
    raise ArithmeticError("planted")


def break_the_stream(patch: pytest.MonkeyPatch, after: int) -> None:
    """Texts that watch for `STOP` fail at this token."""
    push = TextStream.push

    def checked(text: TextStream, token_id: int) -> str | None:
        if text._stop == (STOP,) and text._num_tokens == after:
            breaks()
        return push(text, token_id)

    patch.setattr(TextStream, "push", checked)


FAULTS = {
    "beginning": (Grammar, "begin"),
    "commit": (GrammarState, "extend"),
}


def check_others(responses: Sequence[httpx2.Response]) -> None:
    for number, response in enumerate(responses):
        assert response.json()["choices"][0]["token_ids"] == plain(number)


def check_error(error: Body) -> None:
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, "engine_error")
    assert error["message"].startswith("Request cmpl-")
    assert "failed in the engine (ArithmeticError)" in error["message"]


@pytest.mark.parametrize("fault", [*FAULTS, "detokenizer"])
async def test_one_of_eight_is_answered_with_an_error(
    client: httpx2.AsyncClient, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "detokenizer":
        bad = ask(7, stop=STOP)
        break_the_stream(monkeypatch, after=0)
    else:
        bad = ask(7, structured_outputs={"regex": "[a-z ]{200}"}, ignore_eos=False)
        monkeypatch.setattr(*FAULTS[fault], breaks)
    *others, failed = await answers(client, [*map(ask, range(7)), bad])
    check_others(others)
    assert failed.status_code == 500, failed.text
    check_error(failed.json()["error"])
    (next_one,) = await answers(client, [ask(0)])
    check_others([next_one])


async def test_a_stream_that_fails_ends_with_an_error_event(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_the_stream(monkeypatch, after=6)
    *others, failed = await answers(client, [*map(ask, range(7)), ask(7, stop=STOP, stream=True)])
    check_others(others)
    *pieces, last = events_of(failed)
    sent = [token for piece in pieces for token in piece["choices"][0]["token_ids"]]
    assert sent == plain(7)[: len(sent)]
    assert 0 < len(sent) <= 6
    check_error(last["error"])
