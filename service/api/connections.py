"""Protections that uvicorn lacks: time limits for the headers of a request and for reading its answer, a cap on
connections, half-closed connections, and answers to bytes that are not HTTP."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.errors import error_body
from service.errors import HeadersTooLarge, InvalidRequest, NotReady, RequestError, RequestTimeout, StartupError

HEADER_SECONDS = 10.0
READ_SECONDS = 30.0
PROBE_SECONDS = 1.0
_BACKLOG = 2048  # connections that may wait to be accepted; uvicorn's default


def server_config(
    app: Callable[..., Any], host: str, port: int, *, shutdown_seconds: int, max_connections: int | None = None
) -> uvicorn.Config:
    """Build the configuration of an HTTP server for this application. `shutdown_seconds`: time for open answers at
    shutdown."""
    return uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        limit_concurrency=max_connections,
        timeout_graceful_shutdown=shutdown_seconds,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address; port 0 takes a free port. Raises StartupError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise StartupError(
            f"cannot listen on port {port} of {host}: {why}; stop the program that uses it, or choose another with "
            "--port (0: a free one) and --host"
        ) from error


async def started(server: uvicorn.Server, serving: "asyncio.Task[None]") -> bool:
    """Wait until the server listens. Returns False if it has ended before."""
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    return not serving.done()


def url_of(server: uvicorn.Server) -> str:
    """Return the URL of a server that has started, with the port in use."""
    host, port = server.config.host, server.servers[0].sockets[0].getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else '127.0.0.1' if host == '0.0.0.0' else host}:{port}"


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections which send their headers too slowly, do not read their answer, or exceed the
    cap.

    uvicorn's own limits begin when the headers are complete. The cap is `limit_concurrency` of its configuration.
    """

    header_seconds = HEADER_SECONDS
    read_seconds = READ_SECONDS
    probe_seconds = PROBE_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a connection beyond the cap."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause_writing is called as soon as the client does not read
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            self._refuse(NotReady("Too many connections are open.", code="too_many_connections"))
        else:
            self._limit_time()

    def data_received(self, data: bytes) -> None:
        """Start or stop the time limit of the headers."""
        super().data_received(data)
        self._limit_time()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, or headers larger than h11's limit (64 KiB)."""
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is already being sent
        elif isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HeadersTooLarge.status:
            self._refuse(HeadersTooLarge("The request's headers are too large.", code="headers_too_large"))
        else:
            self._refuse(InvalidRequest(msg, code="invalid_http"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._stop_limiting()
        for timer in (self._stalled, self._probing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Complete the open answer before closing a connection whose client has closed its half. Returns whether the
        connection stays open.

        A client that has left looks the same until something is written to it, so only unstreamed answers need probes.
        """
        if self._half_closed:
            return True
        self._half_closed = True
        if self._has_open_answer and self.conn.their_state is not h11.SEND_BODY:
            self._probing = self.loop.call_later(self.probe_seconds, self._probe)
            return True
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(InvalidRequest("The connection was closed within a request.", code="invalid_http"))
        return False

    def on_response_complete(self) -> None:
        """Close a half-closed connection after its last answer."""
        super().on_response_complete()
        if self._half_closed and not self._has_open_answer and not self.transport.is_closing():
            self.transport.close()

    def pause_writing(self) -> None:
        """Start the time limit for reading the answer."""
        super().pause_writing()
        self._limit_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop the time limit for reading the answer."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    @property
    def _has_open_answer(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _limit_reading(self, num_left: int) -> None:
        """Close the connection unless its client reads some of the `num_left` bytes in time."""

        def check() -> None:
            left = self.transport.get_write_buffer_size()
            if left < num_left:
                self._limit_reading(left)
            else:
                self.transport.abort()

        self._stalled = self.loop.call_later(self.read_seconds, check)

    def _probe(self) -> None:
        """Send an informational response: a client that has left resets the connection."""
        if self._has_open_answer and not self.cycle.response_started:
            if self.scope["http_version"] == "1.1":
                event = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self.transport.write(self.conn.send(event))
            self._probing = self.loop.call_later(self.probe_seconds, self._probe)

    def _limit_time(self) -> None:
        """Limit the time for headers, and for the rest of a request that has been answered."""
        incomplete = self.conn.their_state is h11.IDLE
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if not incomplete and not answered:
            self._stop_limiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.header_seconds, self._give_up)

    def _stop_limiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self.conn.our_state is h11.IDLE:
            self._refuse(RequestTimeout("The request's headers did not arrive in time.", code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Send an error, bypassing the application, and close the connection."""
        body = json.dumps(error_body(error))
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write((head + body).encode())
        self.transport.close()
