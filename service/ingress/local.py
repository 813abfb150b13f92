"""A request to an application in this process, without a socket: what a server would do between the two."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from service.ingress.replicas import FORWARDED_FOR, Asked, Headers

logger = logging.getLogger(__name__)


async def answered(app: ASGIApp, asked: Asked) -> AsyncGenerator[tuple[int, Headers] | bytes, None]:
    """Status and headers, then the body in pieces. Closing this is the client's leaving."""
    async with aclosing(_called(app, asked)) as calls:
        async for messages in calls:
            for message in messages:
                if message["type"] == "http.response.start":
                    yield message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"])
            body = b"".join(message.get("body", b"") for message in messages)
            if body:
                yield body


async def _called(app: ASGIApp, asked: Asked) -> AsyncGenerator[list[Message], None]:
    """What an application sends, as much at a time as has been sent; closing this is the client's leaving.

    Raises what kept it from answering to the end.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left, has_body, is_complete = asyncio.Event(), True, False

    async def receive() -> Message:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": asked.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope_of(asked), receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        message = await sent.get()
        while message is not None:
            messages = [message]
            while not sent.empty() and (message := sent.get_nowait()) is not None:
                messages.append(message)
            is_complete = messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body", False)
            yield messages
            if message is not None:
                message = await sent.get()
        try:
            await running
        except Exception:
            if not is_complete:
                raise
            logger.exception("a bug in %s, which has been answered", asked.path)
        if not is_complete:
            raise RuntimeError(f"{asked.path} was not answered to the end")
    finally:
        left.set()
        await asyncio.gather(running, return_exceptions=True)


def _scope_of(asked: Asked) -> Scope:
    path, _, query = asked.path.partition("?")
    client = next((value.decode() for name, value in asked.headers if name == FORWARDED_FOR), None)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [*asked.headers],
        "client": None if client is None else (client, 0),
        "server": None,
    }
