"""Stored responses: each holds what its turn added to a conversation, and the turn before it."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from service.errors import NotFound

_MAX_STORED_BYTES = 64 * 1024**2


@dataclass(slots=True, eq=False)
class Turn:
    """A response and what its turn added to the conversation, as JSON: text takes its size in memory, and is copied,
    not written again, when it is read."""

    previous: "Turn | None"
    items: tuple[bytes, ...]  # input and output that the next turn reads; some may be joined by commas
    head: bytes  # the response without its braces and `output`
    outputs: Mapping[str, bytes]  # the items of the response, by id
    num_holders: int = field(default=0, init=False)  # its owner, and later turns that are stored
    item_bytes: int = field(init=False)  # memory held while num_holders > 0
    other_bytes: int = field(init=False)  # memory held while its owner can find it
    conversation_bytes: int = field(init=False)  # items of this turn and of those before it

    def __post_init__(self) -> None:
        read = {id(item) for item in self.items}
        self.item_bytes = sum(map(len, self.items))
        self.other_bytes = len(self.head) + sum(len(one) for one in self.outputs.values() if id(one) not in read)
        self.conversation_bytes = self.item_bytes + (self.previous.conversation_bytes if self.previous else 0)

    def conversation(self) -> bytes:
        """The items of the conversation up to this turn, in order, joined by commas. For any thread."""
        turns = [self]
        while turns[-1].previous is not None:
            turns.append(turns[-1].previous)
        return b",".join(item for turn in reversed(turns) for item in turn.items)

    def response(self) -> bytes:
        """The whole response."""
        return b'{%b,"output":[%b]}' % (self.head, b",".join(self.outputs.values()))


class _Shelf:
    """The responses of one owner. A turn's items stay while it, or a later turn of its conversation, can be found:
    forgetting a turn never breaks a later one."""

    def __init__(self) -> None:
        self.found: OrderedDict[str, Turn] = OrderedDict()  # keys: response ids, least recently used first
        self.items: dict[str, bytes] = {}  # items of these responses, by id
        self.num_bytes = 0

    def add(self, response_id: str, turn: Turn) -> None:
        self.found[response_id] = turn
        self.items.update(turn.outputs)
        self.num_bytes += turn.other_bytes
        self._hold(turn, 1)

    def forget(self, response_id: str) -> None:
        turn = self.found.pop(response_id)
        for item_id in turn.outputs:
            del self.items[item_id]
        turn.head, turn.outputs = b"", {}
        self.num_bytes -= turn.other_bytes
        self._hold(turn, -1)

    def _hold(self, turn: Turn | None, change: int) -> None:
        """Count one holder more (1) or less (-1). A turn holds the one before it while it is held itself."""
        while turn is not None:
            turn.num_holders += change
            if turn.num_holders != (1 if change > 0 else 0):
                return
            self.num_bytes += change * turn.item_bytes
            turn = turn.previous


class ResponseStore:
    """Responses of each owner (`Scope.owner`) by id, invisible to other owners.

    If all take too much memory, the owner of the most loses the least recently used one. Of n owners each may thus hold
    an n-th, whatever the others do; what some leave free the others may use. Response by response, the last turn of a
    conversation outlives the turns before it: clients continue from it, and it needs their items.

    Used on the event loop only, but for `item`.
    """

    def __init__(self, *, max_bytes: int = _MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    def keep(self, owner: str, response_id: str, turn: Turn) -> None:
        """Store a response; replaces the owner's one with the same id. The turn before it may have been deleted."""
        shelf = self._shelves[owner]
        if response_id in shelf.found:
            shelf.forget(response_id)
        shelf.add(response_id, turn)
        while sum(one.num_bytes for one in self._shelves.values()) > self._max_bytes:
            fullest = max(self._shelves.values(), key=lambda one: one.num_bytes)
            fullest.forget(next(iter(fullest.found)))

    def find(self, owner: str, response_id: str) -> Turn | None:
        """The owner's response with this id; None: there is none."""
        found = self._shelves[owner].found
        if response_id in found:
            found.move_to_end(response_id)
        return found.get(response_id)

    def get(self, owner: str, response_id: str) -> Turn:
        """The owner's response with this id. Raises NotFound."""
        turn = self.find(owner, response_id)
        if turn is None:
            message = f"Response with id '{response_id}' not found."
            raise NotFound(message, param="response_id", code="response_not_found")
        return turn

    def delete(self, owner: str, response_id: str) -> None:
        """Delete the owner's response. Raises NotFound."""
        self.get(owner, response_id)
        self._shelves[owner].forget(response_id)

    def item(self, owner: str, item_id: str) -> bytes | None:
        """The item with this id of the owner's responses; None: there is none. For any thread."""
        shelf = self._shelves.get(owner)
        return None if shelf is None else shelf.items.get(item_id)
