"""Which share of the memory a scope uses. An owner's scopes never use another owner's shares."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from drafters.protocol import MemorySizes


@dataclass(slots=True)
class _Share:
    number: int
    scope: str | None = None  # None: unused
    readers: int = 0  # running sequences
    last_used: int = 0


@dataclass(slots=True)
class Shares:
    """Shares by scope, fixed in number: a new scope takes the share of its owner that was used longest ago."""

    sizes: MemorySizes
    _owned: dict[str, list[_Share]] = field(default_factory=dict)
    _uses: int = 0

    def read(self, scope: str) -> int | None:
        """Return the scope's share and count one more reader, without marking it as used; None if the scope has
        none."""
        found = self._find(scope)
        if found is None:
            return None
        found.readers += 1
        return found.number

    def take(self, scope: str) -> tuple[int, str | None] | None:
        """The scope's share, for one more reader, and which scope it is taken from if it holds another one's answers;
        None where running sequences use all of the owner's shares."""
        found = self._find(scope)
        if found is None:
            unread = [share for share in self._shares_of(scope) if not share.readers]
            found = min(unread, key=lambda share: (share.scope is not None, share.last_used), default=None)
        if found is None:
            return None
        evicted = found.scope if found.scope != scope else None
        self._uses += 1
        found.scope, found.last_used, found.readers = scope, self._uses, found.readers + 1
        return found.number, evicted

    def adopt(self, scope: str) -> int | None:
        """The scope's share, or an unused one as if it was used before all others, or None."""
        unused = (share for share in self._shares_of(scope) if share.scope is None)
        found = self._find(scope) or next(unused, None)
        if found is None:
            return None
        found.scope = scope
        return found.number

    def release(self, number: int) -> None:
        """One reader less."""
        next(share for share in self._all() if share.number == number).readers -= 1

    def forget(self, scope: str | None = None) -> list[int]:
        """The shares that held answers of this scope, or of any. They are unused from now on, but for those that
        running sequences read and add to."""
        cleared = [share for share in self._all() if share.scope is not None and scope in (None, share.scope)]
        for share in cleared:
            if not share.readers:
                share.scope, share.last_used = None, 0
        return [share.number for share in cleared]

    def held(self) -> dict[str, int]:
        """The share of each scope, the one that was used longest ago first."""
        shares = sorted(self._all(), key=lambda share: share.last_used)
        return {share.scope: share.number for share in shares if share.scope is not None}

    def _find(self, scope: str) -> _Share | None:
        owned = self._owned.get(_owner_of(scope), ())
        return next((share for share in owned if share.scope == scope), None)

    def _all(self) -> Iterator[_Share]:
        return chain.from_iterable(self._owned.values())

    def _shares_of(self, scope: str) -> list[_Share]:
        owner = _owner_of(scope)
        if self.sizes.has_keys and not owner:
            return []
        if owner not in self._owned:
            if len(self._owned) == self.sizes.owners:
                adopted = (own for own, shares in self._owned.items() if not any(share.last_used for share in shares))
                gone = next(adopted, None)  # may have no key any more; its answers are cleared as those of any scope
                if gone is None:
                    return []
                self._owned[owner] = self._owned.pop(gone)
                return self._owned[owner]
            first = len(self._owned) * self.sizes.scopes
            self._owned[owner] = [_Share(first + place) for place in range(self.sizes.scopes)]
        return self._owned[owner]


def _owner_of(scope: str) -> str:
    return scope.partition("/")[0]
