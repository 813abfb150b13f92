"""Settings of the HTTP interface, and the objects that its routes share."""

import hashlib
import hmac
import ipaddress
import logging
import secrets
from dataclasses import dataclass, field

from starlette.requests import Request

from service.api.tenants import Tenant, Tenants
from service.engine.requests import Scope
from service.runtime import Runtime

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 * 1024**2
_MAX_LOGGED_NAMES = 256
_MAX_NAME_CHARACTERS = 128
_KEY_BYTES = 32
_NAMING = b"names of clients"  # no other message that is signed with the secret begins like this


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and keys of the HTTP interface."""

    tenants: Tenants
    admin_digest: bytes | None  # SHA-256 of the operators' key
    open_metrics: bool
    max_output_tokens: int | None  # None: limited by the context length only
    served_model_names: tuple[str, ...]
    max_request_bytes: int = MAX_REQUEST_BYTES
    release_seconds: float | None = None  # seconds between two tokens of a choice; None: as steps produce them
    allowed_hosts: frozenset[str] | None = None  # host names besides localhost and loopback addresses; None: any
    cors_origins: tuple[str, ...] = ()  # origins of web pages whose scripts are admitted
    separate_names: bool = False  # setting `prefix_cache: per_client`
    control_in_prompts: bool = True  # setting `raw_prompts: special`
    # key of the hash that replaces API keys, user names and addresses in scopes
    naming_key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)


@dataclass(frozen=True, slots=True)
class Server:
    """Runtime and settings, shared by all routes."""

    runtime: Runtime
    settings: ApiSettings
    _seen: set[str] = field(default_factory=set)  # names that were logged; limited in number

    def note_ignored(self, name: str) -> None:
        """Log an unknown request field, once per name."""
        self._note("ignoring the unknown request field %r", name)

    def note_relaxed(self, path: str) -> None:
        """Log a part of a function's schema that is not enforced, once per path."""
        self._note("%r is not enforced, because no grammar can express it; with 'strict': true it is refused", path)

    def _note(self, message: str, name: str) -> None:
        name = name[:_MAX_NAME_CHARACTERS]
        if name not in self._seen and len(self._seen) < _MAX_LOGGED_NAMES:
            self._seen.add(name)
            logger.warning(message, name)

    def scope_of(self, request: Request, user: str | None = None) -> Scope:
        """Return the scope of a request's sender: the API key, which the middleware has checked, and a name: `user`
        (the request's `safety_identifier`, else its `user`), or without it the address."""
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        assert tenant is not None or not self.settings.tenants, "the middleware admits no request without a key"
        account = self.account_of(request)
        return Scope(
            key="" if tenant is None else account,
            name=self._hash(f"user:{user}" if user else _address_of(request)),
            separate_names=self.settings.separate_names,
            address=account if tenant is None else "",
            max_running=None if tenant is None else tenant.max_concurrent,
        )

    def account_of(self, request: Request) -> str:
        """Return the hashed account of a request: its API key, or without one its network address."""
        tenant: Tenant | None = getattr(request.state, "tenant", None)
        return self._hash(_address_of(request) if tenant is None else f"key:{tenant.digest.hex()}")

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self.settings.naming_key).hexdigest()


def _address_of(request: Request) -> str:
    return f"address:{network_of(request.client.host) if request.client else ''}"


def network_of(host: str) -> str:
    """Return the network that one client has to itself: an IPv4 address, or the /64 of an IPv6 address, all of which
    the client may use."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a host name
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return str(address if address.version == 4 else ipaddress.ip_network((host, 64), strict=False))


def naming_key(secret: bytes | None) -> bytes:
    """Return the 32-byte key that hashes scopes. With a secret it is the same across restarts and replicas, so that one
    replica can count the queries of all. Without a secret it is random, for this process only."""
    return secrets.token_bytes(_KEY_BYTES) if secret is None else hmac.digest(secret, _NAMING, "sha256")
