"""Who leads: a lease in the store that one replica holds at a time, and an epoch that is higher for each holder.

Whoever writes versions shows lease and epoch with the same command, so that a leader which was away too long cannot
overwrite what its successor has announced. Knows nothing of what a leader does.
"""

from collections.abc import Callable
from typing import Final, Protocol

from adaptation.replicas.redis_store import RedisStore

ACQUIRE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local epoch = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[3])) + 1
redis.call('SET', KEYS[2], string.format('%d', epoch))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return epoch
"""
RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
RAISE: Final = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1]) end
return 1
"""
_TURNS = 3  # of asking, within the time a lease holds


class Claim(Protocol):
    """A replica's claim to lead."""

    @property
    def epoch(self) -> int:
        """Of the lease that is held; 0: none is."""
        ...

    def hold(self, known_epoch: int) -> bool:
        """Acquire or keep the lease, if due; to be called often. # -> whether it is held. Raises StoreLost"""
        ...

    def raise_epoch(self, known_epoch: int) -> None:
        """Leaders to come shall have a higher epoch than this one. Raises StoreLost."""
        ...

    def give_up(self) -> None:
        """Let another one lead at once. Raises StoreLost."""
        ...


class Lease:
    """The claim of one that would lead."""

    def __init__(
        self,
        store: RedisStore,
        lease_key: str,
        epoch_key: str,
        *,
        name: str,
        seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0
        self._store = store
        self._keys = [lease_key, epoch_key]
        self._name = name
        self._seconds = seconds
        self._clock = clock
        self._ask_at = float("-inf")

    def hold(self, known_epoch: int) -> bool:
        now = self._clock()
        if now < self._ask_at:
            return self.epoch > 0
        milliseconds = round(self._seconds * 1000)
        if self.epoch and not self._store.script(RENEW, self._keys, [self._name, milliseconds, self.epoch]):
            self.epoch = 0
        if not self.epoch:
            self.epoch = int(self._store.script(ACQUIRE, self._keys, [self._name, milliseconds, known_epoch]))
        self._ask_at = now + self._seconds / _TURNS  # and at once, where the store was lost meanwhile
        return self.epoch > 0

    def raise_epoch(self, known_epoch: int) -> None:
        self._store.script(RAISE, self._keys[1:], [known_epoch])

    def give_up(self) -> None:
        self.epoch = 0
        self._store.script(RELEASE, self._keys[:1], [self._name])


class NeverLeads:
    """The claim of one that only follows."""

    epoch = 0

    def __init__(self, store: RedisStore, epoch_key: str) -> None:
        self._store = store
        self._epoch_key = epoch_key

    def hold(self, known_epoch: int) -> bool:
        return False

    def raise_epoch(self, known_epoch: int) -> None:
        self._store.script(RAISE, [self._epoch_key], [known_epoch])

    def give_up(self) -> None:
        """Nothing is held."""
