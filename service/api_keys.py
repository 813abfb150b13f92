"""API keys of the configuration with their limits. Only hashes of the keys are stored."""

import hashlib
import re
from collections.abc import Mapping, Sequence
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
_MAX_LIMIT = 10**12


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 hash of a key."""
    return hashlib.sha256(key).digest()  # not a slow hash: keys are drawn at random, and every request would pay


def _hashed(key: SecretStr) -> SecretStr:
    """Convert a key to `sha256:HEX`, unless it is given in this form already. Raises ValueError."""
    text = key.get_secret_value()
    if text.startswith(_HASHED):
        if not _HASH.fullmatch(text.lower()):
            raise ValueError("sha256: must be followed by the 64 hexadecimal digits of the key's SHA-256")
        return SecretStr(text.lower())
    if not text.isascii() or not text.isprintable():
        raise ValueError("a key must be printable ASCII, or no client can send it in a header")
    if not text or " " in text:
        raise ValueError("a key must not be empty or contain spaces")
    return SecretStr(_HASHED + digest_of(text.encode()).hex())


KeyHash = Annotated[SecretStr, AfterValidator(_hashed)]
"""A key that is given as plain text or as `sha256:HEX`, and kept as the hash."""


def digest_in(key: SecretStr) -> bytes:
    """Return the hash in a `KeyHash`, as bytes."""
    return bytes.fromhex(key.get_secret_value().removeprefix(_HASHED))


Amount = Annotated[int | None, Field(ge=1, le=_MAX_LIMIT, strict=True)]


class ApiKey(BaseModel):
    """API key and its limits; a limit of None is unlimited. A key without limits may be given as a string."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: KeyHash
    name: str | None = Field(default=None, pattern=_NAME)  # label in metrics, and account of the budget
    requests_per_minute: Amount = None
    tokens_per_minute: Amount = None
    max_concurrent: Amount = None
    budget_tokens: Amount = None  # tokens per calendar month, UTC

    @model_validator(mode="before")
    @classmethod
    def _of_a_key_alone(cls, value: object) -> object:
        return {"key": value} if isinstance(value, str | SecretStr) else value

    @model_serializer(mode="wrap")
    def _what_is_set(self, dump: SerializerFunctionWrapHandler) -> Mapping[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


def distinct(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    """Remove repeated entries. Raises ValueError if different entries share a key or a name."""
    entries = tuple(dict.fromkeys(keys))
    names = [entry.name for entry in entries if entry.name is not None]
    for what, values in (("key", [entry.key for entry in entries]), ("name", names)):
        if len(set(values)) < len(values):
            raise ValueError(f"two different entries have the same {what}; give each its own")
    return entries
