"""Limits and keys of the HTTP interface, and what its routes share."""

import hashlib
import logging
import secrets
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.schemas import SamplingFields
from service.runtime import Runtime

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 1024**2
_MOST_REMEMBERED_FIELDS = 256
_LONGEST_LOGGED_NAME = 64


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and keys of the HTTP interface."""

    api_keys: tuple[str, ...]
    admin_key: str | None
    open_metrics: bool
    max_output_tokens: int
    served_model_names: tuple[str, ...]
    max_request_bytes: int = MAX_REQUEST_BYTES
    allowed_hosts: frozenset[str] | None = None  # beside those of this machine; None: any


class IgnoredFields:
    """Names each unknown request field once in the log; remembers a bounded number of them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, name: str) -> None:
        name = name[:_LONGEST_LOGGED_NAME]
        if name in self._seen or len(self._seen) >= _MOST_REMEMBERED_FIELDS:
            return
        self._seen.add(name)
        logger.warning("ignoring the unknown request field %r", name)


class ClientNames:
    """Who asks, under names that say nothing about them: a secret per process turns what is known of a client into one.

    Shares of what is learnt are counted by them. Neither keys, user names nor addresses leave this class.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def name(self, scope: Scope, body: SamplingFields, *, by_api_key: bool) -> str:
        """By the API key where keys are checked, else by what the client says of its user, else by its address."""
        if by_api_key:
            # The credentials alone, however the client writes the scheme before them.
            return self._hash("key", (Headers(scope=scope).get("authorization") or "").partition(" ")[2].strip())
        user, peer = body.safety_identifier or body.user, scope.get("client")
        return self._hash("user", user) if user else self._hash("address", peer[0] if peer else "")

    def _hash(self, kind: str, value: str) -> str:
        text = f"{kind}:{value}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16, key=self._key).hexdigest()


@dataclass(frozen=True, slots=True)
class Server:
    """What every route works with."""

    runtime: Runtime
    settings: ApiSettings
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    clients: ClientNames = field(default_factory=ClientNames)

    def client_of(self, scope: Scope, body: SamplingFields) -> str:
        """The name under which a client's share of what is learnt is counted."""
        return self.clients.name(scope, body, by_api_key=bool(self.settings.api_keys))
