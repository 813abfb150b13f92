"""An application around a scripted engine, and a client that speaks to it without a network."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI
from starlette.types import ASGIApp

from service.api.app import create_app
from service.api.settings import ApiSettings
from service.api.tenants import Tenants
from service.api_keys import ApiKey, digest_of
from service.observability.live import Live
from service.runtime import Runtime
from service.text.tokenizer import ChatTokenizer
from tests.service.scripted import TOKENIZER, ScriptedAdaptation, ScriptedEngine, runtime_of

SETTINGS = ApiSettings(
    tenants=Tenants((), Path("nowhere")),
    admin_digest=None,
    open_metrics=True,
    max_request_bytes=200_000,
    max_output_tokens=40,
    served_model_names=("tiny", "org/tiny"),
)
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
Body = dict[str, Any]


def app_of(
    runtime: Runtime,
    *,
    live: Live | None = None,
    api_keys: Sequence[object] = (),
    admin_key: str | None = None,
    folder: Path = Path("nowhere"),
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> FastAPI:
    """Keys as the configuration takes them; `folder` is where budgets are kept."""
    keys = [ApiKey.model_validate(key) for key in api_keys]
    changes |= {"tenants": Tenants(keys, folder, clock=clock)} if keys else {}
    changes |= {} if admin_key is None else {"admin_digest": digest_of(admin_key.encode())}
    return create_app(runtime, replace(SETTINGS, **changes), live=live or Live(), render_metrics=_metrics)


async def _metrics() -> tuple[bytes, str]:
    return b"lag 1\n", "text/plain"


@asynccontextmanager
async def client_of(
    engine: ScriptedEngine,
    *,
    adaptation: ScriptedAdaptation | None = None,
    tokenizer: ChatTokenizer = TOKENIZER,
    **changes: Any,
) -> AsyncIterator[httpx2.AsyncClient]:
    runtime = runtime_of(engine, adaptation=adaptation, tokenizer=tokenizer)
    app = app_of(runtime, **changes)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        yield client


async def post(engine: ScriptedEngine, path: str = CHAT, **fields: Any) -> httpx2.Response:
    """The answer to one request."""
    async with client_of(engine) as client:
        return await client.post(path, json={**(ASK if path == CHAT else {"model": "tiny"}), **fields})


def client_for(app: FastAPI) -> httpx2.AsyncClient:
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx2.AsyncClient(transport=transport, base_url="http://test")


def events_of(response: httpx2.Response) -> list[Body]:
    """The JSON events of a stream that ended as it should."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.partition("data: ")[2]) for frame in frames[:-2]]


def error_of(response: httpx2.Response) -> Body:
    """The error of an answer, which always has exactly these four keys."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: Body = body["error"]
    return error


Message = MutableMapping[str, Any]


async def call_raw(
    app: ASGIApp,
    path: str,
    body: Body,
    receive_later: Callable[[], Awaitable[Message]],
    sent: list[Message],
    *,
    more_body: bool = False,
    key: str | None = None,
) -> None:
    """A POST at the level of ASGI; once the body is read, `receive_later` says what the client does.

    With `more_body` the body is only the first half of one.
    """
    raw, delivered = json.dumps(body).encode(), False

    async def receive() -> Message:
        nonlocal delivered
        if delivered:
            return await receive_later()
        delivered = True
        return {"type": "http.request", "body": raw, "more_body": more_body}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("test", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)


def bearer(key: str) -> dict[str, str]:
    """The header of a client with this key."""
    return {"authorization": f"Bearer {key}"}


async def until(happened: Callable[[], object]) -> None:
    """Wait until it is so, for five seconds at most."""
    async with asyncio.timeout(5):
        while not happened():
            await asyncio.sleep(0.005)
