"""Where the leader announces versions: a small record that says which, their weights in pieces, and the shared state.

Only who holds the lease can write, which the store itself checks. Bytes come and go unread.
"""

from typing import Final

from adaptation.records import Refused
from adaptation.replicas.redis_store import RedisStore

CHUNK_BYTES: Final = 1 << 20
_KEPT_SECONDS: Final = 600  # weights that nobody announces (any more), for whoever is still reading them

ANNOUNCE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
if redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
if KEYS[5] ~= KEYS[4] then redis.call('EXPIRE', KEYS[5], ARGV[4]) end
redis.call('PERSIST', KEYS[4])
redis.call('SET', KEYS[3], ARGV[3])
return 1
"""
GIVE_BACK: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('PERSIST', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
SHARE: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[3], ARGV[3])
return 1
"""


class Board:
    """The keys of one fingerprint. All methods raise StoreLost."""

    def __init__(self, store: RedisStore, prefix: str, *, name: str) -> None:
        self.lease_key = f"{prefix}:lease"
        self.epoch_key = f"{prefix}:epoch"
        self._current = f"{prefix}:version"
        self._state = f"{prefix}:state"
        self._weights = f"{prefix}:weights:"
        self._store = store
        self._name = name

    def current(self) -> bytes | None:
        """What is announced."""
        found: bytes | None = self._store.command("GET", self._current)
        return found

    def announce(self, epoch: int, raw: bytes, sha256: str, before: str) -> bool:
        """Replace what is announced; its weights must be there already. # -> False: another one leads"""
        keys = [self.lease_key, self.epoch_key, self._current, self._weights + sha256, self._weights + before]
        return bool(self._store.script(ANNOUNCE, keys, [self._name, epoch, raw, _KEPT_SECONDS]))

    def give_back(self, raw: bytes, sha256: str) -> bool:
        """Announce again what a store that was emptied has forgotten; anybody may, and the first does."""
        return bool(self._store.script(GIVE_BACK, [self._current, self._weights + sha256], [raw]))

    def put(self, sha256: str, data: bytes) -> None:
        """Weights, for a while only: until they are announced."""
        key = self._weights + sha256
        for start in range(0, len(data), CHUNK_BYTES):
            self._store.command("HSET", key, start // CHUNK_BYTES, data[start : start + CHUNK_BYTES])
            self._store.command("EXPIRE", key, _KEPT_SECONDS)

    def has(self, sha256: str, num_bytes: int) -> bool:
        """Whether all pieces are there, whatever is in them."""
        return bool(self._store.command("HLEN", self._weights + sha256) == -(-num_bytes // CHUNK_BYTES))

    def get(self, sha256: str, num_bytes: int) -> bytes:
        """Weights, as far as they are there. Raises Refused if a piece is missing."""
        pieces: list[bytes] = []
        for number in range(-(-num_bytes // CHUNK_BYTES)):
            piece: bytes | None = self._store.command("HGET", self._weights + sha256, number)
            if piece is None:
                raise Refused("torn", f"piece {number} of weights {sha256[:16]} is missing")
            pieces.append(piece)
        return b"".join(pieces)

    def remove(self, sha256: str) -> None:
        """Weights that are not what they should be: the leader sees that they are gone, and puts them there again."""
        self._store.command("DEL", self._weights + sha256)

    def share(self, epoch: int, raw: bytes) -> bool:
        """Replace the shared state. # -> False: another one leads"""
        return bool(self._store.script(SHARE, [self.lease_key, self.epoch_key, self._state], [self._name, epoch, raw]))

    def shared(self) -> bytes | None:
        found: bytes | None = self._store.command("GET", self._state)
        return found
