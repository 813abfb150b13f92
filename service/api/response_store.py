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

    client: str
    response: Mapping[str, JsonValue]
    items: Sequence[JsonValue]

    @property
    def num_bytes(self) -> int:
        return len(pydantic_core.to_json([self.response, self.items]))


class ResponseStore:
    """Belongs to the event loop. The longest unused ones make room."""

    def __init__(self, *, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self._num_bytes = 0

    def keep(self, response_id: str, stored: Stored) -> None:
        size, (_, replaced) = stored.num_bytes, self._held.pop(response_id, (None, 0))
        self._held[response_id] = stored, size
        self._num_bytes += size - replaced
        while self._num_bytes > self._most_bytes:
            _, (_, freed) = self._held.popitem(last=False)
            self._num_bytes -= freed

    def find(self, response_id: str, client: str) -> Stored | None:
        """What this client may see under that id."""
        found, _ = self._held.get(response_id, (None, 0))
        if found is None or found.client != client:
            return None
        self._held.move_to_end(response_id)
        return found

    def get(self, response_id: str, client: str) -> Stored:
        """Raises NotFound."""
        found = self.find(response_id, client)
        if found is None:
            message = f"Response with id '{response_id}' not found."
            raise NotFound(message, param="response_id", code="response_not_found")
        return found

    def delete(self, response_id: str, client: str) -> None:
        """Raises NotFound."""
        self.get(response_id, client)
        self._num_bytes -= self._held.pop(response_id)[1]
