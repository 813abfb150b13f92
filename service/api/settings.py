"""Limits and keys of the HTTP interface, and what its routes share."""

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass, field

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.schemas import SamplingFields
from service.api.tenants import Tenants
from service.runtime import Runtime

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 1024**2
_MOST_REMEMBERED_FIELDS = 256
_LONGEST_LOGGED_NAME = 64
_KEY_BYTES = 32
_NAMING = b"names of clients"  # no kind of message that is signed with the same secret begins so


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and keys of the HTTP interface."""

    tenants: Tenants
    admin_digest: bytes | None  # SHA-256 of the operators' key
    open_metrics: bool
    max_output_tokens: int
    served_model_names: tuple[str, ...]
    max_request_bytes: int = MAX_REQUEST_BYTES
    release_seconds: float | None = None  # between two tokens of a choice; None: as steps bring them
    allowed_hosts: frozenset[str] | None = None  # beside those of this machine; None: any
    naming_key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)  # of clients


@dataclass(frozen=True, slots=True)
class Server:
    """What every route works with."""

    runtime: Runtime
    settings: ApiSettings
    _seen: set[str] = field(default_factory=set)  # names of unknown fields, a bounded number

    def note_ignored(self, name: str) -> None:
        """Name each unknown request field once in the log."""
        name = name[:_LONGEST_LOGGED_NAME]
        if name not in self._seen and len(self._seen) < _MOST_REMEMBERED_FIELDS:
            self._seen.add(name)
            logger.warning("ignoring the unknown request field %r", name)

    def client_of(self, scope: Scope, body: SamplingFields | None) -> str:
        """The name under which a client's share of what is learnt is counted."""
        return client_name(self.settings.naming_key, scope, body, by_api_key=bool(self.settings.tenants))


def naming_key(shared: SecretStr | None) -> bytes:
    """What clients' names are hashed with: by replicas that share a secret alike, for whoever leads counts the queries
    of all; else by this process alone."""
    if shared is None:
        return secrets.token_bytes(_KEY_BYTES)
    return hmac.digest(shared.get_secret_value().encode(), _NAMING, "sha256")


def client_name(secret: bytes, scope: Scope, body: SamplingFields | None, *, by_api_key: bool) -> str:
    """Who asks, under a name that says nothing about them: neither keys, user names nor addresses leave this function.

    By the API key where keys are checked, else by what the client says of its user, else by its address.
    """
    user, peer = body and (body.safety_identifier or body.user), scope.get("client")
    if by_api_key:
        # The credentials alone, however the client writes the scheme before them.
        text = "key:" + (Headers(scope=scope).get("authorization") or "").partition(" ")[2].strip()
    else:
        text = f"user:{user}" if user else f"address:{peer[0] if peer else ''}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=secret).hexdigest()
