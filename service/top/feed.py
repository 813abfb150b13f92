"""Reads the feed of a server that may be anywhere, and says plainly why there is nothing to read."""

import json
from collections.abc import Iterator
from typing import Any, Final

import httpx

_FEED: Final = "/adaptree/feed"
_PATIENCE: Final = httpx.Timeout(5, read=15)

Json = dict[str, Any]


class NoFeedError(Exception):
    """There is nothing to show; the message says why and what to do."""


def moments(url: str, key: str | None) -> Iterator[tuple[str, Json]]:
    """The events of a server's feed with their names. Raises NoFeedError."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        with httpx.stream("GET", url + _FEED, headers=headers, timeout=_PATIENCE) as response:
            _refuse(response, url)
            yield from _parsed(response.iter_lines())
    except httpx.ReadTimeout:
        raise NoFeedError(f"the server at {url} has fallen silent") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        problem = f"no server answers at {url} ({error or type(error).__name__})"
        raise NoFeedError(f"{problem}: start one with `adaptree serve`, or say where it is with --url") from None


def _refuse(response: httpx.Response, url: str) -> None:
    if response.status_code == 401:
        raise NoFeedError(f"the server at {url} wants an API key: give one with --key")
    if response.status_code != 200:
        raise NoFeedError(f"the server at {url} has no feed (status {response.status_code}): is it adaptree?")


def _parsed(lines: Iterator[str]) -> Iterator[tuple[str, Json]]:
    name = "moment"
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
            name = "moment"
