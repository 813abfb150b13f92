"""What keeps books fails in a server that learns: every text is what it was, and the server says what is off."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import pytest

from adaptation.config import AdaptationConfig
from drafters.network.recording import FeedbackRecorder
from service.assembly import assemble
from service.config import ServiceConfig
from service.engine import accounting, engine
from service.engine.accounting import StepAccounting
from service.engine.drafting import DraftStage
from service.observability.live import Live
from service.observability.metrics import Metrics
from service.serve import application
from tests.service.api.client import client_for
from tests.service.bench.parts import save_drafter, save_two_layers, settings_for
from tests.tiny_models import random_prompts

PLANTS: dict[str, tuple[object, ...]] = {
    "charge": (accounting, engine, "charge"),
    "end_queries": (StepAccounting, "end_queries"),
    "end_step": (StepAccounting, "end_step"),
    "learn": (DraftStage, "learn"),
    "metrics": (Metrics, "observe_step"),
    "observers": (Live, "observe_step"),
    "recorder": (FeedbackRecorder, "commit"),
}
"""By part: where it is called, and the name of what raises there."""
PROMPTS = list(random_prompts(4, 20))
ROUNDS = 4


def breaks(*args: object, **kwargs: object) -> None:
    raise LookupError("planted")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServiceConfig:
    root = tmp_path_factory.mktemp("books")
    bare = settings_for(save_two_layers(root / "model")).model_copy(update={"budget_policy": "fixed"})
    learning = AdaptationConfig(enabled=True, train_in="thread")
    values = {"adaptation": learning, "drafter": "memory+specblock", "state_dir": root / "state", "open_metrics": True}
    values |= {"allowed_hosts": ("test",)}
    drafter = save_drafter(root / "drafter", assemble(bare.model_copy(update={"drafter": "memory"})))
    return bare.model_copy(update={**values, "drafter_path": drafter})


@asynccontextmanager
async def serving(config: ServiceConfig) -> AsyncIterator[httpx2.AsyncClient]:
    app, runtime = application(config)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        yield client


async def texts(client: httpx2.AsyncClient) -> list[list[int]]:
    """Of four requests together, two of them at a temperature above 0."""

    async def text(number: int) -> list[int]:
        body = {"model": "model", "prompt": PROMPTS[number], "seed": number, "max_tokens": 24, "ignore_eos": True}
        wanted = {"temperature": number % 2, "return_token_ids": True}
        response = await client.post("/v1/completions", json={**body, **wanted})
        assert response.status_code == 200, response.text
        found: list[int] = response.json()["choices"][0]["token_ids"]
        return found

    return await asyncio.gather(*map(text, range(len(PROMPTS))))


@pytest.mark.parametrize("part", PLANTS)
async def test_no_text_ends_or_differs(config: ServiceConfig, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception is counted, and the third one in a row switches the part off."""
    *owners, name = PLANTS[part]
    live = Live()
    monkeypatch.setattr("service.serve.Live", lambda: live)
    async with serving(config) as client:
        plain = await texts(client)
        for owner in owners:
            once(monkeypatch, owner, str(name))
        assert await texts(client) == plain
        assert await texts(client) == plain
        assert (await client.get("/readyz")).json()["switched_off"] == {}
        assert f'adaptree_internal_errors_total{{part="{part}"}} 1.0\n' in (await client.get("/metrics")).text
        for owner in owners:
            monkeypatch.setattr(owner, str(name), breaks, raising=False)
        for _ in range(ROUNDS):
            assert await texts(client) == plain
        ready = await client.get("/readyz")
        page = (await client.get("/metrics")).text
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert set(ready.json()["switched_off"]) == {part}
        assert f'adaptree_internal_errors_total{{part="{part}"}} 4.0\n' in page
        assert f'adaptree_switched_off{{part="{part}"}} 1.0\n' in page
        assert set(live.tick()["switched_off"]) == {part}, "the feed, which the live page shows"


def once(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    usual: Callable[..., object] | None = getattr(owner, name, None)
    calls = iter(range(1_000_000))

    def patched(*args: object, **kwargs: object) -> object:
        if next(calls) == 1:
            breaks()
        assert usual is not None
        return usual(*args, **kwargs)

    patch.setattr(owner, name, patched, raising=False)
