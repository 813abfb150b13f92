"""What uvicorn leaves open: a time limit for the headers of a request, and a cap on connections."""

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.errors import error_body
from service.errors import HeadersTooLarge, InvalidRequest, NotReady, RequestError, RequestTimeout

HEADER_SECONDS = 10.0


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections which are slow to say what they want, or one too many.

    uvicorn's own limits begin when the headers are complete. `limit_concurrency` of its configuration is the cap here.
    """

    header_seconds = HEADER_SECONDS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_connections, self.limit_concurrency = self.limit_concurrency, None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most_connections is not None and len(self.connections) > self._most_connections:
            self._refuse(NotReady("Too many connections are open.", code="too_many_connections"))
        else:
            self._limit_time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_time()

    def send_400_response(self, msg: str) -> None:
        """Called where the bytes that came are no HTTP, or more of headers than h11 keeps (64 KiB)."""
        error = sys.exception()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer is on its way, into which no other can be put
        elif isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == HeadersTooLarge.status:
            self._refuse(HeadersTooLarge("The request's headers are too large.", code="headers_too_large"))
        else:
            self._refuse(InvalidRequest(msg, code="invalid_http"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_limiting()
        super().connection_lost(exc)

    def _limit_time(self) -> None:
        """Headers must be complete in time, and so must what is still sent of a request that has been answered."""
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
        """Answer below the application, which never learns of this connection, and close it."""
        body = json.dumps(error_body(error))
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write((head + body).encode())
        self.transport.close()
