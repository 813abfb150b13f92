"""Whose traffic is learnt from: no client takes more than its share of the update data, and no query counts for many.

Requests with `store: false` leave no trace here. Clients are known by a keyed hash with a key that lives as long as
the process; use is forgotten by halves. Knows neither the data nor what becomes of it.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

QuotaReason = Literal["admitted", "not_stored", "nothing_to_learn", "over_share", "resting"]

_TICKS = 64  # per half-life: within a tick nothing is forgotten, so that a query costs no walk over all clients
_LEAST_OFFERS = 2.0  # queries; who offers less would lower the cap of others without using the own one
_NEGLIGIBLE = 0.01  # queries or positions
_KEPT_OF_FULL = 3, 4


@dataclass(frozen=True, slots=True)
class Admission:
    """How many of a query's rejected positions may be learnt from; 0 unless the reason is `admitted`."""

    positions: int
    reason: QuotaReason

    @property
    def admitted(self) -> bool:
        return self.positions > 0


@dataclass(slots=True)
class _Use:
    offers: float = 0.0  # queries
    taken: float = 0.0  # positions


class Quota:
    """Admits a query while its client has not yet had more than its share of what was learnt recently.

    The share is `client_share`, or an equal one while there are too few active clients to fill the whole with it: a
    single client is learnt from without limit. Below `free_queries` nobody is refused, or a client that sends little
    would stop the learning from one that sends much. A client can exceed its share by one query at most.
    Of more than `most_clients` the least used are forgotten, which forgives a client a small share at most.
    """

    def __init__(
        self,
        *,
        client_share: float,
        free_queries: int,
        query_positions: int,
        half_life_seconds: float,
        most_clients: int,
        clock: Callable[[], float],
    ) -> None:
        self._client_share = client_share
        self._free_positions = free_queries * query_positions
        self._query_positions = query_positions
        self._tick_seconds = half_life_seconds / _TICKS
        self._most_clients = most_clients
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._uses: dict[bytes, _Use] = {}
        self._num_active = 0
        self._taken = 0.0
        self._ticked_at = clock()

    @property
    def num_clients(self) -> int:
        return len(self._uses)

    @property
    def share(self) -> float:
        """What one client may take now."""
        return max(self._client_share, 1 / max(1, self._num_active))

    def admit(self, client: str, positions: int, *, store: bool) -> Admission:
        """Ask for a finished query with so many rejected positions, and take what is granted."""
        if not store:
            return Admission(0, "not_stored")
        if positions < 1:
            return Admission(0, "nothing_to_learn")
        self._forget()
        use = self._offer(self._hash(client))
        # The total is a sum of the parts, but not to the last bit.
        if use.taken > max(self._free_positions, self.share * self._taken * (1 + 1e-9)):
            return Admission(0, "over_share")
        granted = min(positions, self._query_positions)
        use.taken += granted
        self._taken += granted
        return Admission(granted, "admitted")

    def _hash(self, client: str) -> bytes:
        return hashlib.blake2b(client.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key).digest()

    def _offer(self, name: bytes) -> _Use:
        if name not in self._uses and len(self._uses) >= self._most_clients:
            self._make_room()
        use = self._uses.setdefault(name, _Use())
        was_active = use.offers >= _LEAST_OFFERS
        use.offers += 1
        self._num_active += not was_active and use.offers >= _LEAST_OFFERS
        return use

    def _forget(self) -> None:
        ticks = int((self._clock() - self._ticked_at) / self._tick_seconds)
        if ticks < 1:
            return
        self._ticked_at += ticks * self._tick_seconds
        kept = 0.5 ** (ticks / _TICKS)
        for use in self._uses.values():
            use.offers *= kept
            use.taken *= kept
        self._keep({name: use for name, use in self._uses.items() if max(use.offers, use.taken) > _NEGLIGIBLE})

    def _make_room(self) -> None:
        """Forget the least used quarter: a crowd of new names costs one sort per quarter, and who took much stays."""
        by_use = sorted(self._uses.items(), key=lambda item: (item[1].taken, item[1].offers), reverse=True)
        part, whole = _KEPT_OF_FULL
        self._keep(dict(by_use[: self._most_clients * part // whole]))

    def _keep(self, uses: dict[bytes, _Use]) -> None:
        self._uses = uses
        self._num_active = sum(use.offers >= _LEAST_OFFERS for use in uses.values())
        self._taken = sum(use.taken for use in uses.values())
