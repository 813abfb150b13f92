"""Access to Redis: the loop of the thread that talks to it, and the state that replicas keep there, which is the
leader's lease, the announced version, and the stream of finished queries.

The only module that imports redis, which is an extra. Contents are opaque bytes. Every command returns within a bounded
time or raises StoreLost; then the loop waits and tries again.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from adaptation.records import Refused, StoreLost, StoreRefused
from adaptation.worker import lower_priority

LEASE_SECONDS: Final = 3.0  # lifetime without renewal, and how long a store may be unreachable
MAX_QUERIES: Final = 128  # most queries waiting in the store, and in each replica
CHUNK_BYTES: Final = 1 << 20
_STEP_SECONDS: Final = 0.1
_FIRST_RETRY_SECONDS: Final = 0.1
_LONGEST_RETRY_SECONDS: Final = 2.0
_KEPT_SECONDS: Final = 600  # lifetime of weights that are not or no longer announced, for replicas still reading them
_RENEWALS: Final = 3  # renewals per lease time
_GROUP: Final = "learner"
_FIRST: Final = "0-0"
_RAW_REPLIES: Final = 2  # protocol version whose replies are plain lists
_INHERITED: Final = ("epoch", "state", "queries", "heard", "version")

# Scripts run atomically. KEYS begin with lease and epoch if needed.
_UNLESS_LEADING: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[2] then return 0 end
"""
_ACQUIRE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%d', epoch))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
"""
_RENEW: Final = f"{_UNLESS_LEADING} return redis.call('PEXPIRE', KEYS[1], ARGV[3])"
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
_RAISE_EPOCH: Final = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
"""
_ANNOUNCE: Final = f"""{_UNLESS_LEADING}
if redis.call('EXISTS', KEYS[4]) == 0 then return 0 end
if KEYS[5] ~= KEYS[4] then redis.call('EXPIRE', KEYS[5], ARGV[4]) end
redis.call('PERSIST', KEYS[4])
redis.call('SET', KEYS[3], ARGV[3])
return 1
"""
_REINSTATE: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('PERSIST', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""
_SHARE: Final = f"""{_UNLESS_LEADING}
redis.call('SET', KEYS[3], ARGV[3])
return 1
"""
_ACKNOWLEDGE: Final = """
for index = 3, 2 + tonumber(ARGV[2]) do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[index])
  redis.call('XDEL', KEYS[1], ARGV[index])
end
for index = 3 + tonumber(ARGV[2]), #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[index], ARGV[index + 1]) end
redis.call('EXPIRE', KEYS[2], 86400)
return 1
"""

Part = bytes | str | int | float


@dataclass(frozen=True, slots=True)
class QueryMessage:
    """A finished query, encoded for sending."""

    header: bytes
    tensors: bytes

    @property
    def num_bytes(self) -> int:
        """Size of header and tensors in bytes."""
        return len(self.header) + len(self.tensors)


Entry = tuple[bytes, QueryMessage | None]
"""The store's id of a stream entry, and its message; the message is None if the entry is not a query."""


class RedisStore:
    """One connection of one replica, one command at a time: to one server, or to all nodes of its cluster.

    Only the holder of the lease can announce and share. The script that writes checks this, so that a leader whose
    lease has ended cannot overwrite what its successor announced. Queries are delivered at least once: a consumer group
    keeps delivered ones until they are acknowledged, and the next leader finds in an offset per sender what was
    observed.
    """

    def __init__(
        self, url: str, prefix: str, *, name: str, timeout_seconds: float, max_queries: int = MAX_QUERIES
    ) -> None:
        """Connects at the first command. `timeout_seconds`: limit for the answer of one server; nodes of a cluster may
        be asked one after the other. `max_queries`: approximate limit of queries in the store. Raises ValueError for an
        invalid URL, or if the redis package is missing."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise ValueError(
                f"adaptation.redis_url: {error}: install it with `pip install 'adaptree[redis]'`"
            ) from error
        self.name = name
        self.prefix = f"{{{prefix}}}"  # a hash tag: a cluster keeps all keys on one node, which scripts need
        self.lease_keys = f"{self.prefix}:lease", f"{self.prefix}:epoch"
        self._version, self._weights = f"{self.prefix}:version", f"{self.prefix}:weights:"
        self._queries, self._offsets = f"{self.prefix}:queries", f"{self.prefix}:heard"
        self._max_queries = max_queries
        self._claim_from = b""
        self._errors = redis.exceptions
        options: dict[str, Any] = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), timeout_seconds)
        # A second try would double the time that a command may take.
        options |= {"protocol": _RAW_REPLIES, "retry": Retry(NoBackoff(), 0)}
        try:
            self._client: Any = redis.Redis.from_url(url, **options)
        except ValueError as error:
            raise ValueError(f"adaptation.redis_url cannot be used: {error}") from error
        self._as_cluster: Callable[[], Any] | None = partial(redis.RedisCluster.from_url, url, **options)

    def command(self, *parts: Part) -> Any:
        """Run one Redis command. Raises StoreRefused if it was not carried out, and StoreLost if it may have been."""
        errors = self._errors
        lost = errors.ConnectionError, errors.TimeoutError, errors.ClusterError, errors.RedisClusterException, OSError
        try:
            if self._as_cluster is not None:
                self._recognise(self._as_cluster)
            return self._client.execute_command(*parts)
        except lost as error:
            raise StoreLost(f"{parts[0]!s}: {type(error).__name__}: {error}") from error
        except errors.RedisError as error:
            raise StoreRefused(f"{parts[0]!s}: {error}") from error

    def _recognise(self, as_cluster: Callable[[], Any]) -> None:
        """Connect to all nodes if the server belongs to a cluster, since any node may hold the keys, now or later."""
        self._client.execute_command("PING")  # its error names a missing password; the error of HELLO does not
        server: list[Any] = self._client.execute_command("HELLO")
        if server[server.index(b"mode") + 1] == b"cluster":
            self._client.close()
            self._client = as_cluster()
        self._as_cluster = None

    def script(self, text: str, keys: Sequence[str], *arguments: Part) -> int:
        """Run a Lua script that returns an integer. Raises the errors of `command`."""
        return int(self.command("EVAL", text, len(keys), *keys, *arguments))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def current(self) -> bytes | None:
        """Return the record of the announced version, as stored. Returns None if no version is announced."""
        found: bytes | None = self.command("GET", self._version)
        return found

    def announce(self, epoch: int, raw: bytes, sha256: str, before: str) -> bool:
        """Replace the announced version by `raw`, whose weights must be stored; `before`: hash of weights that may
        expire now. Returns False, and changes nothing, if another replica leads or the weights are missing."""
        keys = [*self.lease_keys, self._version, self._weights + sha256, self._weights + before]
        return bool(self.script(_ANNOUNCE, keys, self.name, epoch, raw, _KEPT_SECONDS))

    def reinstate(self, raw: bytes, sha256: str) -> bool:
        """Announce a version again in a store that was emptied. Any replica may do this; returns whether this one
        did."""
        return bool(self.script(_REINSTATE, [self._version, self._weights + sha256], raw))

    def put(self, sha256: str, data: bytes, holds: Callable[[], bool] = lambda: True) -> bool:
        """Store weights unless they are stored; they expire unless they are announced. `holds` is called before each
        chunk. Returns False, with the weights incomplete, if `holds` did."""
        if self.has(sha256, len(data)):
            return True
        key = self._weights + sha256
        for start in range(0, len(data), CHUNK_BYTES):
            if not holds():
                return False
            self.command("HSET", key, start // CHUNK_BYTES, data[start : start + CHUNK_BYTES])
            self.command("EXPIRE", key, _KEPT_SECONDS)
        return True

    def has(self, sha256: str, num_bytes: int) -> bool:
        """Whether all chunks of these weights are stored; their contents are not checked."""
        return bool(self.command("HLEN", self._weights + sha256) == -(-num_bytes // CHUNK_BYTES))

    def get(self, sha256: str, num_bytes: int) -> bytes:
        """Read weights. Raises Refused if a chunk is missing."""
        pieces: list[bytes] = []
        for number in range(-(-num_bytes // CHUNK_BYTES)):
            piece: bytes | None = self.command("HGET", self._weights + sha256, number)
            if piece is None:
                raise Refused("torn", f"piece {number} of weights {sha256[:16]} is missing")
            pieces.append(piece)
        return b"".join(pieces)

    def remove(self, sha256: str) -> None:
        """Delete damaged weights. The leader notices that they are missing and stores them again."""
        self.command("DEL", self._weights + sha256)

    def share(self, epoch: int, raw: bytes) -> bool:
        """Store the learning state for the next leader. Returns False if another replica leads."""
        return bool(self.script(_SHARE, [*self.lease_keys, f"{self.prefix}:state"], self.name, epoch, raw))

    def shared(self) -> bytes | None:
        """Return the learning state that a leader stored for the next one. Returns None if there is none."""
        found: bytes | None = self.command("GET", f"{self.prefix}:state")
        return found

    def join(self) -> None:
        """Create the consumer group of the queries, unless it exists."""
        try:
            self.command("XGROUP", "CREATE", self._queries, _GROUP, _FIRST, "MKSTREAM")
        except StoreRefused as error:
            if "BUSYGROUP" not in str(error):
                raise

    def inherit(self, sha256_of: Callable[[bytes], str]) -> None:
        """Rename keys of 0.3.0, which had no braces, unless a version is announced. `sha256_of`: returns the hash of a
        version's weights; its errors are raised."""
        former = self.prefix[1:-1]
        raw: bytes | None = self.command("GET", f"{former}:version")
        if raw is None or self.current() is not None:
            return
        for name in (f"weights:{sha256_of(raw)}", *_INHERITED):  # the version last: until then others may continue
            if self.command("EXISTS", f"{former}:{name}"):
                self.command("RENAME", f"{former}:{name}", f"{self.prefix}:{name}")

    def send(self, message: QueryMessage) -> None:
        """Append a query to the stream; the oldest are dropped. Raises StoreRefused if the store has no room for it."""
        fields = ("header", message.header, "tensors", message.tensors)
        self.command("XADD", self._queries, "MAXLEN", "~", self._max_queries, "*", *fields)

    def take_over(self) -> dict[str, int]:
        """Start with the entries that the previous leader did not acknowledge. Returns the offsets by sender."""
        self._claim_from = _FIRST.encode()
        found: Mapping[bytes, bytes] = self.command("HGETALL", self._offsets)
        return {sender.decode(errors="replace"): int(offset) for sender, offset in found.items() if offset.isdigit()}

    def receive(self, most: int) -> list[Entry]:
        """Return up to `most` messages: first those that the previous leader did not acknowledge, then new ones."""
        if self._claim_from:
            claim = ("XAUTOCLAIM", self._queries, _GROUP, self.name, 0, self._claim_from, "COUNT", most)
            answer = self.command(*claim)
            self._claim_from = b"" if answer[0] == _FIRST.encode() else answer[0]
            return [_entry(*entry) for entry in answer[1]]
        reading = ("XREADGROUP", "GROUP", _GROUP, self.name, "COUNT", most, "STREAMS", self._queries, ">")
        streams = self.command(*reading) or []
        return [_entry(*entry) for _, entries in streams for entry in entries]

    def acknowledge(self, entry_ids: Sequence[bytes], offsets: Mapping[str, int]) -> None:
        """Acknowledge and delete entries, and store the offsets by sender."""
        pairs: chain[Part] = chain.from_iterable(offsets.items())
        self.script(_ACKNOWLEDGE, [self._queries, self._offsets], _GROUP, len(entry_ids), *entry_ids, *pairs)


def talk(attempt: Callable[[], bool], stopping: threading.Event, niceness: int) -> None:
    """Call `attempt` every 0.1 seconds until `stopping` is set. While it returns False, because the store is lost, wait
    with exponential backoff and jitter instead. `niceness`: added to the thread's."""
    lower_priority(niceness)
    longest = _FIRST_RETRY_SECONDS
    while not stopping.is_set():
        if attempt():
            wait, longest = _STEP_SECONDS, _FIRST_RETRY_SECONDS
        else:
            wait, longest = random.uniform(longest / 2, longest), min(_LONGEST_RETRY_SECONDS, 2 * longest)
        stopping.wait(wait)


class Lease:
    """Lease of the leader. One replica holds it at a time, and every acquisition has a higher epoch than the one
    before."""

    def __init__(
        self,
        store: RedisStore,
        *,
        seconds: float = LEASE_SECONDS,
        eligible: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`eligible`: whether this replica may lead."""
        self.seconds = seconds
        self.epoch = 0  # epoch of the held lease; 0: not held
        self._store = store
        self._clock = clock
        self._eligible = eligible
        self._ask_at = float("-inf")

    def hold(self, known_epoch: int) -> bool:
        """Acquire or renew the lease if due; called often. Returns whether it is held."""
        now = self._clock()
        if not self._eligible or now < self._ask_at:
            return self.epoch > 0
        keys, name, milliseconds = self._store.lease_keys, self._store.name, round(self.seconds * 1000)
        if self.epoch and not self._store.script(_RENEW, keys, name, self.epoch, milliseconds):
            self.epoch = 0
        if not self.epoch:
            self.epoch = self._store.script(_ACQUIRE, keys, name, milliseconds, known_epoch)
        self._ask_at = now + self.seconds / _RENEWALS  # unchanged after StoreLost: then the next call asks at once
        return self.epoch > 0

    def raise_epoch(self, known_epoch: int) -> None:
        """Make the epochs of later leases higher than this one."""
        self._store.script(_RAISE_EPOCH, self._store.lease_keys[1:], known_epoch)

    def release(self) -> None:
        """Give the lease up, so that another replica leads at once."""
        if self._eligible:
            self.epoch = 0
            self._store.script(_RELEASE, self._store.lease_keys[:1], self._store.name)


def _entry(entry_id: bytes, fields: Any) -> Entry:
    # The client returns fields as a mapping for commands that it knows, and as a list for others.
    named = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    header, tensors = named.get(b"header"), named.get(b"tensors")
    if isinstance(header, bytes) and isinstance(tensors, bytes):
        return entry_id, QueryMessage(header, tensors)
    return entry_id, None
