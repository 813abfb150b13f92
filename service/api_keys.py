"""API keys as the configuration names them: hashed from the moment they are read, with the limits they carry."""

import hashlib
import hmac
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

_HASHED = "sha256:"
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = r"^[A-Za-z0-9._-]{1,64}$"
_MOST = 10**12  # of anything a limit counts


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # not a slow hash: keys are drawn at random, and every request would pay


def is_same(digest: bytes, other: bytes) -> bool:
    """In a time that does not tell where they differ."""
    return hmac.compare_digest(digest, other)


def _hashed(key: SecretStr) -> SecretStr:
    """`sha256:` and the hash in hexadecimal digits, of a key or of what is hashed already. Raises ValueError."""
    text = key.get_secret_value()
    if text.startswith(_HASHED):
        if not _HASH.fullmatch(text.lower()):
            raise ValueError("behind sha256: there must be the 64 hexadecimal digits of the key's SHA-256")
        return SecretStr(text.lower())
    if not text.isascii() or not text.isprintable():
        raise ValueError("a key must be printable ASCII, or no client can send it in a header")
    if not text or " " in text:
        raise ValueError("a key must not be empty or contain spaces")
    return SecretStr(_HASHED + digest_of(text.encode()).hex())


KeyHash = Annotated[SecretStr, AfterValidator(_hashed)]
"""A key given plainly or as `sha256:HEX`. Only the hash is kept."""


def digest_in(key: SecretStr) -> bytes:
    """The hash that a `KeyHash` holds."""
    return bytes.fromhex(key.get_secret_value().removeprefix(_HASHED))


Amount = Annotated[int | None, Field(ge=1, le=_MOST, strict=True)]


class ApiKey(BaseModel):
    """A key that clients may send, and its limits; None: unlimited. A key alone may be given as a plain string."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: KeyHash
    name: str | None = Field(default=None, pattern=_NAME)  # a label of metrics, and what a budget is kept by
    requests_per_minute: Amount = None
    tokens_per_minute: Amount = None
    max_concurrent: Amount = None
    budget_tokens: Amount = None  # in a calendar month, UTC

    @model_validator(mode="before")
    @classmethod
    def _of_a_key_alone(cls, value: object) -> object:
        return {"key": value} if isinstance(value, str | SecretStr) else value

    @model_serializer(mode="wrap")
    def _what_is_set(self, dump: SerializerFunctionWrapHandler) -> Mapping[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


def distinct(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    """Each entry once. Raises ValueError for a key or a name with two meanings."""
    entries = tuple(dict.fromkeys(keys))
    for what, values in (("key", [entry.key for entry in entries]), ("name", list(_names(entries)))):
        if len(set(values)) < len(values):
            raise ValueError(f"two different entries have the same {what}; give each its own")
    return entries


def _names(keys: Sequence[ApiKey]) -> Iterator[str]:
    return (entry.name for entry in keys if entry.name is not None)
