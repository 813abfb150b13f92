"""Signed bytes: what is in them is whole, and, where replicas share a secret, was written by one of them.

Without a secret only accidents are noticed. Knows nothing of what is signed, but what kind of thing it is, so that
one kind can never pass for another.
"""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Literal, Protocol

from pydantic import JsonValue

from adaptation.checkpoint import seal, unseal
from adaptation.records import Damaged, Refused

Kind = Literal["query", "version", "state"]
_BETWEEN = b"\n"


class Signature(Protocol):
    """Whether bytes come from somebody who may speak."""

    def of(self, kind: Kind, data: bytes) -> str: ...

    def holds(self, kind: Kind, data: bytes, signature: str) -> bool: ...


class SharedSecret:
    """HMAC-SHA256 with a secret that all replicas have, and nobody else."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def of(self, kind: Kind, data: bytes) -> str:
        return hmac.new(self._secret, kind.encode() + _BETWEEN + data, hashlib.sha256).hexdigest()

    def holds(self, kind: Kind, data: bytes, signature: str) -> bool:
        return hmac.compare_digest(self.of(kind, data).encode(), signature.encode())


class NoSecret:
    """Everybody who reaches the store may speak."""

    def of(self, kind: Kind, data: bytes) -> str:
        return ""

    def holds(self, kind: Kind, data: bytes, signature: str) -> bool:
        return True


def signed(kind: Kind, content: Mapping[str, JsonValue], signature: Signature) -> bytes:
    """Raises ValueError for numbers that JSON has no word for."""
    data = seal(content)
    return signature.of(kind, data).encode() + _BETWEEN + data


def opened(kind: Kind, raw: bytes, signature: Signature) -> dict[str, JsonValue]:
    """What `signed` was given. Raises Refused."""
    shown, _, data = raw.partition(_BETWEEN)
    if not signature.holds(kind, data, shown.decode("ascii", "replace")):
        raise Refused("forged", f"a {kind} that is not signed with the shared secret")
    try:
        return unseal(data)
    except Damaged as error:
        raise Refused("torn", f"a {kind} that is {error}") from error
