"""Which weights all replicas shall serve, as one small record that is read often; the weights lie elsewhere.

Versions are ordered by epoch, then by number. An epoch belongs to one leader and only rises, so that what a former
leader still sends is old.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, JsonValue, NonNegativeInt, PositiveInt, StringConstraints, TypeAdapter, ValidationError

from adaptation.records import Refused
from adaptation.replicas.signature import Signature, opened, signed

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One version."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epoch: PositiveInt  # of the leader's lease
    number: NonNegativeInt  # counts versions, across leaders
    sha256: Sha256  # of the weights as they are sent
    parent: str  # sha256 of the version before; empty for the first
    num_bytes: PositiveInt
    fingerprint: str  # of everything that weights must fit
    leader: str
    date: str  # ISO 8601, UTC

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.number


_ANNOUNCEMENT = TypeAdapter(Announcement)


def written(announcement: Announcement, signature: Signature) -> bytes:
    content: dict[str, JsonValue] = _ANNOUNCEMENT.dump_python(announcement, mode="json")
    return signed("version", content, signature)


def read(raw: bytes, signature: Signature) -> Announcement:
    """Raises Refused."""
    try:
        return _ANNOUNCEMENT.validate_python(opened("version", raw, signature))
    except ValidationError as error:
        raise Refused("torn", "an announcement that lacks something") from error
