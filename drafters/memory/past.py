"""Past answers by scope. Each scope has a fixed share of the table's buckets and a row of learned weights, and never
reads those of another scope."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import chain
from operator import add
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters.memory_counts import MemoryCounts
from drafters.protocol import DraftContext, MemorySizes
from kernels.memory import BUCKET_BYTES, CONTEXT, ORDERS, Memory

_PRIOR_SQUARES = 20.0  # initial sum of squared gradients: the fitted weights count as some hundred labels
_SAMPLE_EVERY, _SAMPLED = 64, 1024  # steps between samples of the usage, and buckets in a sample


@dataclass(frozen=True, slots=True)
class ScopeAnswers:
    """Past answers of a scope. The tensors are views, which later steps write to."""

    scope: str
    share: int
    generation: int  # number of times that the share was cleared
    entries: Tensor  # [buckets, WAYS] int64
    weights: Tensor  # [KINDS, FEATURES] float32
    squares: Tensor  # [KINDS, FEATURES] float32, AdaGrad's sums of squared gradients


class PastListener(Protocol):
    """Observer of changes to past answers; called on the engine thread."""

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Called after an answer was added: the last `num_new` of `tokens`, which begin with up to CONTEXT earlier
        ones."""

    def forgot(self, scope: str | None) -> None:
        """Called after the past answers of a scope, or of all scopes if it is None, were deleted."""


class _RunningAnswer(NamedTuple):
    scope: str
    tokens: Sequence[int]  # prompt and answer; grows while the sequence runs
    num_known: int  # number of leading tokens that are not reported to listeners


class PastAnswers:
    """Assigns shares of the memory's table to scopes, clears them, and gives access to their contents. All methods but
    `is_current` must be called on the engine thread."""

    def __init__(self, memory: Memory, sizes: MemorySizes) -> None:
        """The table begins with the shares: share i has buckets [i * share_buckets, (i + 1) * share_buckets)."""
        self.listeners: list[PastListener] = []
        self.share_buckets = buckets_per_share(sizes)  # 0: past answers are not remembered
        self._memory = memory
        self._shares = Shares(sizes)
        self._held: dict[int, int] = {}  # row -> share, of running sequences that have one
        self._running: dict[int, _RunningAnswer] = {}  # row -> answer, of running sequences that store
        self._generations = [0] * num_shares(sizes)
        used = len(self._generations) * self.share_buckets
        self._counts = MemoryCounts(reserved_bytes=used * BUCKET_BYTES, known_tokens=(0,) * len(ORDERS))
        self._sample = memory.entries[: used : max(1, used // _SAMPLED)]
        self._num_steps = 0
        memory.weights[:] = _prior()
        memory.squares[:] = _PRIOR_SQUARES

    @property
    def counts(self) -> MemoryCounts:
        """Totals since the start, for metrics."""
        return self._counts

    def begin(self, context: DraftContext) -> int | None:
        """Assign a share to a sequence that starts (see `take`). Returns None if it gets none."""
        share = self.take(context.row, context.scope, stores=context.store)
        if share is not None and context.store and context.scope is not None:
            self._running[context.row] = _RunningAnswer(context.scope, context.tokens, len(context.tokens))
        return share

    def take(self, row: int, scope: str | None, *, stores: bool) -> int | None:
        """Assign a share to a row, after releasing the one it had. With `stores`: the scope's share, else an unused or
        evicted share of the same owner, which is cleared. Otherwise: the scope's share, if it has one. Returns None if
        `scope` is None or no share is available."""
        self.end(row)
        if scope is None:
            return None
        share, evicted = (self._shares.take(scope) or (None, None)) if stores else (self._shares.read(scope), None)
        if share is not None:
            self._held[row] = share
        if share is not None and evicted is not None:
            self._clear([share])
            self._counts = replace(self._counts, evicted_scopes=self._counts.evicted_scopes + 1)
        return share

    def end(self, row: int) -> None:
        """Release the row's share, and report its answer to the listeners."""
        if row in self._held:
            self._shares.release(self._held.pop(row))
        if row in self._running:
            scope, tokens, known = self._running.pop(row)
            num_new = len(tokens) - known
            for listener in self.listeners if num_new > 0 else ():
                listener.answered(scope, tokens[max(0, known - CONTEXT) :], num_new)

    def forget(self, scope: str | None = None) -> None:
        """Delete the past answers of a scope, or of all scopes if it is None, and the weights learned from them."""
        shares = self._shares.forget(scope)
        self._clear(shares)
        for row, running in self._running.items():  # only later tokens are reported to listeners
            if self._held[row] in shares:
                self._running[row] = running._replace(num_known=len(running.tokens))
        self._counts = replace(self._counts, forgotten_shares=self._counts.forgotten_shares + len(shares))
        for listener in self.listeners:
            listener.forgot(scope)

    def by_scope(self) -> list[ScopeAnswers]:
        """Return the past answers of every scope, the least recently used scope first."""
        return [self._answers_of(scope, share) for scope, share in self._shares.held().items()]

    def is_current(self, answers: ScopeAnswers) -> bool:
        """Whether the share was not cleared since `answers` was made. May be called from any thread."""
        return self._generations[answers.share] == answers.generation

    def adopt(self, scope: str) -> ScopeAnswers | None:
        """Return the scope's share, or an unused one of its owner, to be filled with answers of an earlier run. Returns
        None if there is none."""
        share = self._shares.adopt(scope)
        return None if share is None else self._answers_of(scope, share)

    def with_usage(self, counts: Tensor) -> Tensor:
        """Append, in every 64th step, the number of used entries in a sample of the table. # counts [n] -> [n or n +
        1]"""
        self._num_steps += 1
        if self._num_steps % _SAMPLE_EVERY != 1 or not self.share_buckets:
            return counts
        return torch.cat([counts, (self._sample != 0).sum()[None]])

    def count(self, remembered: int, known: Sequence[int], used: int | None = None) -> None:
        """Add a step to the totals. `remembered`: tokens added to past answers; `known`: tokens that past answers
        predicted, by context length; `used`: used entries in the sample, None if it was not taken."""
        counts = self._counts
        self._counts = replace(
            counts,
            used_share=counts.used_share if used is None else used / self._sample.numel(),
            remembered_tokens=counts.remembered_tokens + remembered,
            known_tokens=tuple(map(add, counts.known_tokens, known)),
        )

    def _answers_of(self, scope: str, share: int) -> ScopeAnswers:
        memory, first = self._memory, share * self.share_buckets
        entries = memory.entries[first : first + self.share_buckets]
        return ScopeAnswers(
            scope, share, self._generations[share], entries, memory.weights[share], memory.squares[share]
        )

    def _clear(self, shares: Iterable[int]) -> None:
        for share in shares:
            self._generations[share] += 1  # before the content is cleared: see `is_current`
            self._memory.entries[share * self.share_buckets : (share + 1) * self.share_buckets] = 0
            self._memory.weights[share] = _prior()
            self._memory.squares[share] = _PRIOR_SQUARES


def num_shares(sizes: MemorySizes) -> int:
    """Return the number of shares: owners times scopes per owner."""
    return sizes.owners * sizes.scopes


def buckets_per_share(sizes: MemorySizes) -> int:
    """Return the number of buckets of each share, a power of two; 0 if the memory has no room."""
    return power_of_two(sizes.num_bytes // (num_shares(sizes) * BUCKET_BYTES))


def power_of_two(limit: int) -> int:
    """Return the largest power of two up to a limit; 0 for 0."""
    return 1 << limit.bit_length() - 1 if limit else 0


@dataclass(slots=True)
class _Share:
    number: int
    scope: str | None = None  # None: unused
    readers: int = 0  # number of running sequences that read it
    last_used: int = 0


@dataclass(slots=True)
class Shares:
    """Assignment of a fixed number of shares to scopes. A new scope gets its owner's least recently used share."""

    sizes: MemorySizes
    _owned: dict[str, list[_Share]] = field(default_factory=dict)
    _uses: int = 0

    def read(self, scope: str) -> int | None:
        """Add a reader to the scope's share and return it, without marking it as used. Returns None if the scope has
        none."""
        found = self._find(scope)
        if found is None:
            return None
        found.readers += 1
        return found.number

    def take(self, scope: str) -> tuple[int, str | None] | None:
        """Add a reader to the scope's share, which is assigned if it has none. Returns the share and the scope that was
        evicted from it, if any. Returns None if running sequences use all shares of the owner."""
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
        """Return the scope's share, or assign an unused one as the least recently used. Returns None if there is
        none."""
        unused = (share for share in self._shares_of(scope) if share.scope is None)
        found = self._find(scope) or next(unused, None)
        if found is None:
            return None
        found.scope = scope
        return found.number

    def release(self, number: int) -> None:
        """Remove a reader of a share."""
        next(share for share in self._all() if share.number == number).readers -= 1

    def forget(self, scope: str | None = None) -> list[int]:
        """Return the shares of this scope, or of all scopes if it is None. Those without readers become unused."""
        cleared = [share for share in self._all() if share.scope is not None and scope in (None, share.scope)]
        for share in cleared:
            if not share.readers:
                share.scope, share.last_used = None, 0
        return [share.number for share in cleared]

    def held(self) -> dict[str, int]:
        """Return the share of each scope, the least recently used scope first."""
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
                gone = next(adopted, None)  # an owner without requests since the start: its key may be gone
                if gone is None:
                    return []
                self._owned[owner] = self._owned.pop(gone)
                return self._owned[owner]
            first = len(self._owned) * self.sizes.scopes
            self._owned[owner] = [_Share(first + place) for place in range(self.sizes.scopes)]
        return self._owned[owner]


def _owner_of(scope: str) -> str:
    return scope.partition("/")[0]


@cache
def _prior() -> Tensor:
    """Return initial weights, fitted by penalised maximum likelihood to 161,000 labels of answers to training prompts
    at T = 0 and 0.7, and around these to 179,000 more at T = 0, 0.7 and 1, the latter two with filters as well.
    # [KINDS, FEATURES]"""
    return torch.tensor(json.loads(files(__package__).joinpath("prior.json").read_text()))
