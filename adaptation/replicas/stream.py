"""The stream of queries to whoever leads: each is handed over at least once, and the oldest make room.

A consumer group keeps what was handed over until it is done, and a mark per sender says how far it was heard, for the
leader after this one. Bytes come and go unread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from adaptation.records import StoreRefused
from adaptation.replicas.redis_store import Part, RedisStore

DONE: Final = """
for place = 3, 2 + tonumber(ARGV[2]) do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[place])
  redis.call('XDEL', KEYS[1], ARGV[place])
end
for place = 3 + tonumber(ARGV[2]), #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[place], ARGV[place + 1]) end
redis.call('EXPIRE', KEYS[2], 86400)
return 1
"""
_GROUP = "learner"
_FIRST = "0-0"


@dataclass(frozen=True, slots=True)
class Letter:
    """One query as it travels."""

    header: bytes
    tensors: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.tensors)


@dataclass(frozen=True, slots=True)
class Delivered:
    """A letter under the number by which the store knows it; None: it is no letter."""

    number: bytes
    letter: Letter | None


class QueryStream:
    """Both ends of the stream. All methods raise StoreLost."""

    def __init__(self, store: RedisStore, prefix: str, *, name: str, most_letters: int) -> None:
        """`most_letters`: kept in the store at most, or a few more, for what costs nothing."""
        self._store = store
        self._key = f"{prefix}:queries"
        self._marks = f"{prefix}:heard"
        self._name = name
        self._most_letters = most_letters
        self._claim_from = b""

    def join(self) -> None:
        """See that there is a group to read in."""
        try:
            self._store.command("XGROUP", "CREATE", self._key, _GROUP, _FIRST, "MKSTREAM")
        except StoreRefused as error:
            if "BUSYGROUP" not in str(error):
                raise

    def send(self, letter: Letter) -> None:
        """Raises StoreRefused for a letter that the store has no room for."""
        fields = ("header", letter.header, "tensors", letter.tensors)
        self._store.command("XADD", self._key, "MAXLEN", "~", self._most_letters, "*", *fields)

    def take_over(self) -> dict[str, int]:
        """Begin with what the leader before has left undone. # -> how far each sender was heard"""
        self._claim_from = _FIRST.encode()
        found: Mapping[bytes, bytes] = self._store.command("HGETALL", self._marks)
        return {sender.decode(errors="replace"): int(mark) for sender, mark in found.items() if mark.isdigit()}

    def receive(self, most: int) -> list[Delivered]:
        """The next letters: what a leader before has left, then new ones."""
        if self._claim_from:
            answer = self._store.command(
                "XAUTOCLAIM", self._key, _GROUP, self._name, 0, self._claim_from, "COUNT", most
            )
            self._claim_from = b"" if answer[0] == _FIRST.encode() else answer[0]
            return [_delivered(*entry) for entry in answer[1]]
        reading = ("XREADGROUP", "GROUP", _GROUP, self._name, "COUNT", most, "STREAMS", self._key, ">")
        streams = self._store.command(*reading) or []
        return [_delivered(*entry) for _, entries in streams for entry in entries]

    def done(self, numbers: Sequence[bytes], marks: Mapping[str, int]) -> None:
        """These need not be handed over again."""
        arguments: list[Part] = [_GROUP, len(numbers), *numbers]
        for sender, mark in marks.items():
            arguments += [sender, mark]
        self._store.script(DONE, [self._key, self._marks], arguments)


def _delivered(number: bytes, fields: Any) -> Delivered:
    # The client makes a mapping of the fields where it knows the command, and leaves a list where it does not.
    named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    header, tensors = named.get(b"header"), named.get(b"tensors")
    if not (isinstance(header, bytes) and isinstance(tensors, bytes)):
        return Delivered(number, None)
    return Delivered(number, Letter(header, tensors))
