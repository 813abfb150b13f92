"""Who finds whose prompts in the prefix cache: a whole server as its settings make it, asked over HTTP."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.serve import application
from tests.service.bench.parts import save_two_layers, settings_for

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "so it is that the other was what it is"}
LEAST = 9
"""Tokens of the system prompt at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_layers(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def serving(folder: Path, *, keys: Sequence[str] = (), prefix_cache: str = "shared") -> AsyncIterator[FastAPI]:
    changes = {"api_keys": keys, "prefix_cache": prefix_cache, "drafter": "memory", "served_model_name": "tiny"}
    settings = settings_for(folder)
    config = type(settings).model_validate({**settings.model_dump(exclude_unset=True), **changes})
    app, runtime = application(config)
    async with app.router.lifespan_context(app):
        await runtime.wait_until_loaded()
        yield app


def about(question: str) -> dict[str, Any]:
    """A body with the system prompt that all requests have."""
    return {"model": "tiny", "messages": [SYSTEM, {"role": "user", "content": question}], "max_tokens": 2}


def finds(answer: dict[str, Any]) -> bool:
    """Whether the request found the system prompt in the cache."""
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 0 or cached > LEAST
    return cached > 0


async def found(app: FastAPI, question: str, key: str = "", *, address: str = "a", **spoken: str) -> bool:
    """As `finds`, of a question that is asked now."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx2.ASGITransport(app=app, client=(address, 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        response = await client.post(CHAT, json={**about(question), **spoken}, timeout=60)
    assert response.status_code == 200, response.text
    return finds(response.json())


async def test_keys_share_no_prefix_and_the_users_of_one_key_do(folder: Path) -> None:
    async with serving(folder, keys=["one", "two"]) as app:
        assert not await found(app, "1", "one", user="u")
        assert await found(app, "2", "one", user="v")
        assert not await found(app, "3", "two", user="u")
        assert await found(app, "4", "two")
        assert await found(app, "5", "one", safety_identifier="w", address="b")


async def test_names_of_a_key_are_kept_apart_if_asked_for(folder: Path) -> None:
    async with serving(folder, keys=["one", "two"], prefix_cache="per_client") as app:
        assert not await found(app, "1", "one", user="u")
        assert not await found(app, "2", "one", user="v")
        assert not await found(app, "3", "two", user="u")
        assert await found(app, "4", "one", safety_identifier="u", user="v", address="b")
        assert await found(app, "5", "two", user="u")


async def test_without_keys_all_share(folder: Path) -> None:
    async with serving(folder) as app:
        assert not await found(app, "1", user="u")
        assert await found(app, "2", user="v")
        assert await found(app, "3", "any key", address="b")


async def test_without_keys_names_are_kept_apart_if_asked_for_but_anybody_can_claim_one(folder: Path) -> None:
    async with serving(folder, prefix_cache="per_client") as app:
        assert not await found(app, "1", user="u")
        assert not await found(app, "2", user="v")
        assert not await found(app, "3")
        assert not await found(app, "4", address="b")
        assert await found(app, "5")
        assert await found(app, "6", "any key", user="u", address="b")


async def test_an_ingress_passes_on_what_the_scope_is_made_of(folder: Path) -> None:
    """A replica behind it sees each sender's key and address."""

    async def is_found(app: FastAPI, question: str, key: str, address: str) -> bool:
        # uvicorn reads headers by this; its types of ASGI differ from those of httpx2 and Starlette
        behind = httpx2.ASGITransport(ProxyHeadersMiddleware(app), client=("127.0.0.1", 1))  # type: ignore[arg-type]
        headers = {"authorization": f"Bearer {key}", "x-forwarded-for": address}
        async with httpx2.AsyncClient(transport=behind, base_url="http://localhost", headers=headers) as client:
            return finds((await client.post(CHAT, json=about(question))).json())

    async with serving(folder, keys=["one", "two"], prefix_cache="per_client") as app:
        assert not await is_found(app, "1", "one", "a")
        assert await is_found(app, "2", "one", "a")
        assert not await is_found(app, "3", "one", "b")
        assert not await is_found(app, "4", "two", "a")
