"""The store that replicas share: one connection to a Redis server, one command at a time.

The only module that imports redis. It says whether the store was reached and what it answered, never what that means;
waiting and trying again is up to whoever asks. All calls come from one thread.
"""

from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NotInTime
from redis.retry import Retry

from adaptation.records import StoreLost, StoreRefused

Part = bytes | str | int | float
_RAW_REPLIES = 2  # the version of the protocol whose answers are plain lists


class RedisStore:
    """Commands to a server, each of which answers within a bounded time or raises StoreLost."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        """Connects at the first command. Raises ValueError for a URL that is none."""
        self._client = Redis.from_url(
            url,
            protocol=_RAW_REPLIES,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),  # a second try would double the time that a command may take
        )

    def command(self, *parts: Part) -> Any:
        """One command. Raises StoreLost, and then it may or may not have been carried out."""
        try:
            return self._client.execute_command(*parts)  # type: ignore[no-untyped-call]
        except (NotConnected, NotInTime, OSError) as error:
            raise StoreLost(f"{parts[0]!s}: {type(error).__name__}: {error}") from error
        except RedisError as error:
            raise StoreRefused(f"{parts[0]!s}: {error}") from error

    def script(self, text: str, keys: list[str], arguments: list[Part]) -> Any:
        """Several commands of which none comes between two others' of them. Raises StoreLost."""
        return self.command("EVAL", text, len(keys), *keys, *arguments)

    def close(self) -> None:
        self._client.close()
