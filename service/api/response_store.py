"""Responses that may be asked for again and gone on from: the latest ones, in memory, as far as they fit."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pydantic_core
from pydantic import JsonValue

from service.errors import NotFound

_MOST_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, and the items of its conversation so far."""

    response: Mapping[str, JsonValue]
    items: Sequence[JsonValue]

    @property
    def num_bytes(self) -> int:
        return len(pydantic_core.to_json([self.response, self.items]))


class ResponseStore:
    """Each owner's responses by their ids, out of reach of other owners; the least recently used ones make room.

    Belongs to the event loop. An owner is `Scope.owner`.
    """

    def __init__(self, *, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, owner: str, stored: Stored) -> None:
        """Store a response under its id; replaces the owner's one with the same id."""
        place, size = (owner, str(stored.response["id"])), stored.num_bytes
        _, replaced = self._held.pop(place, (None, 0))
        self._held[place] = stored, size
        self._num_bytes += size - replaced
        while self._num_bytes > self._most_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self._num_bytes -= freed

    def find(self, owner: str, response_id: str) -> Stored | None:
        """An owner's response."""
        found, _ = self._held.get((owner, response_id), (None, 0))
        if found is not None:
            self._held.move_to_end((owner, response_id))
        return found

    def get(self, owner: str, response_id: str) -> Stored:
        """As `find`. Raises NotFound."""
        found = self.find(owner, response_id)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise NotFound(message, param="response_id", code="response_not_found")
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Raises NotFound."""
        self.get(owner, response_id)
        self._num_bytes -= self._held.pop((owner, response_id))[1]
