"""Who asks, under a name that says nothing about them: shares of what is learnt are counted by it.

Names hold for one process only, as its key does. Neither keys, user names nor addresses leave this module.
"""

import hashlib
import secrets

from starlette.datastructures import Headers
from starlette.types import Scope

from service.api.schemas import SamplingFields

_KEY_BYTES = 32
_NAME_BYTES = 16


class ClientNames:
    """One secret per process turns what is known of a client into its name."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)

    def name(self, scope: Scope, body: SamplingFields, *, by_api_key: bool) -> str:
        """By the API key where keys are checked, else by what the client says of its user, else by its address."""
        if by_api_key:
            return self._hash("key", _shown_key(scope))
        user = body.safety_identifier or body.user
        return self._hash("user", user) if user else self._hash("address", _address(scope))

    def _hash(self, kind: str, value: str) -> str:
        text = f"{kind}:{value}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=_NAME_BYTES, key=self._key).hexdigest()


def _shown_key(scope: Scope) -> str:
    """The credentials alone, however the client writes the scheme before them."""
    return (Headers(scope=scope).get("authorization") or "").partition(" ")[2].strip()


def _address(scope: Scope) -> str:
    peer = scope.get("client")
    return peer[0] if peer else ""
