"""Limits and keys of the HTTP interface, and what its routes share."""

import hashlib
import hmac
import logging
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request

from service.api.tenants import Tenant, Tenants
from service.runtime import Runtime
from service.scope import Scope

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 1024**2
_MOST_REMEMBERED_FIELDS = 256
_LONGEST_LOGGED_NAME = 128
_KEY_BYTES = 32
_NAMING = b"names of clients"  # no kind of message that is signed with the same secret begins so


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and keys of the HTTP interface."""

    tenants: Tenants
    admin_digest: bytes | None  # SHA-256 of the operators' key
    open_metrics: bool
    max_output_tokens: int | None  # None: what is left of the context
    served_model_names: tuple[str, ...]
    max_request_bytes: int = MAX_REQUEST_BYTES
    release_seconds: float | None = None  # between two tokens of a choice; None: as steps bring them
    allowed_hosts: frozenset[str] | None = None  # beside those of this machine; None: any
    cors_origins: tuple[str, ...] = ()  # of web pages whose scripts may ask
    separate_names: bool = False  # `prefix_cache: per_client`
    naming_key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)  # of scopes


class Named(Protocol):
    """What says for which user of its sender a request is."""

    @property
    def safety_identifier(self) -> str | None: ...

    @property
    def user(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Server:
    """What every route works with."""

    runtime: Runtime
    settings: ApiSettings
    _seen: set[str] = field(default_factory=set)  # names of unknown fields, a bounded number

    def note_ignored(self, name: str) -> None:
        """Name each unknown request field once in the log."""
        self._note("ignoring the unknown request field %r", name)

    def note_relaxed(self, path: str) -> None:
        """Name each part of a function's schema once that calls are not held to."""
        self._note("calls are not held to %r, which no grammar can say; 'strict': true refuses it", path)

    def _note(self, message: str, name: str) -> None:
        name = name[:_LONGEST_LOGGED_NAME]
        if name not in self._seen and len(self._seen) < _MOST_REMEMBERED_FIELDS:
            self._seen.add(name)
            logger.warning(message, name)

    def scope_of(self, request: Request, body: Named | None = None) -> Scope:
        """Who sent a request: the key that the middleware has checked, and a name: `safety_identifier`, else `user`,
        else the address."""
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        assert tenant is not None or not self.settings.tenants, "the middleware lets in no request without a key"
        user = body and (body.safety_identifier or body.user)
        name = f"user:{user}" if user else f"address:{request.client.host if request.client else ''}"
        key = "" if tenant is None else self._hash(f"key:{tenant.digest.hex()}")
        return Scope(key, self._hash(name), self.settings.separate_names)

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self.settings.naming_key).hexdigest()


def naming_key(secret: bytes | None) -> bytes:
    """The key that scopes are hashed with, 32 bytes: the same one wherever the secret is: over restarts, and in
    replicas, of which one counts the queries of all. Without a secret it is one of this process alone."""
    return secrets.token_bytes(_KEY_BYTES) if secret is None else hmac.digest(secret, _NAMING, "sha256")
