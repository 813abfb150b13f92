"""The contract between the engine and drafters. docs/drafters.md says how to add a kind.

A step of decoding is, for a drafter: `grow` proposes trees, the engine verifies them, `commit` reports which tokens
became permanent, `timed` what the step took. A sequence begins with `start` under a row number and ends with `finish`;
a step that reads prompts calls `read` for each piece."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from drafters.decision import RegretLedger
from drafters.memory_counts import MemoryCounts
from drafters.tree import Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture
from kernels.lattice import Lattice


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A sequence that joins the batch, or rejoins it after preemption."""

    row: int  # identifies the sequence while it runs: drafters keep their state in tables indexed by it
    tokens: Sequence[int]  # prompt and everything generated so far
    prediction: Sequence[int] = ()  # the answer the client expects, when it sent one
    num_generated: int = 0  # how many of `tokens`, at their end, were generated
    cached: Tensor | None = None  # [cached] int64, target slots of a prefix that is in the KV pool already
    store: bool = True  # False: nothing of it may be kept or learnt from
    scope: str | None = ""  # past answers it reads and adds to: of an owner, or OWNER/NAME; None: of none
    warm: bool = False  # whether its temperature is above 0


@dataclass(frozen=True, slots=True)
class HostMetadata:
    """Rows and roots of a batch on the host, so that no caller has to wait for the device."""

    rows: tuple[int, ...]
    roots: tuple[int, ...]  # absolute positions

    @staticmethod
    def of(rows: Tensor, roots: Tensor) -> "HostMetadata":
        """Copy them from the device, for callers that have them only there. # rows, roots [batch] int64"""
        both: list[list[int]] = torch.stack([rows, roots]).tolist()  # planned transfer: not while serving
        return HostMetadata(tuple(both[0]), tuple(both[1]))


@dataclass(frozen=True, slots=True)
class Noise:
    """The keys of each sequence's sampling noise, with which a drafter can rank tokens by the target's own scores."""

    seeds: Tensor  # [batch] int64
    temperatures: Tensor  # [batch] float32
    positions: Tensor  # [batch] int64, absolute position of the root; its children are at the next one
    warm: bool = True  # False: no temperature is above 0
    host: HostMetadata | None = None  # rows and roots on the host

    @staticmethod
    def of_text(seed: int, temperature: float, roots: Tensor) -> "Noise":
        """Return the noise of one sequence at several roots. # roots [batch] int64, absolute positions"""
        temperatures = torch.full_like(roots, temperature, dtype=torch.float32)
        return Noise(torch.full_like(roots, seed), temperatures, roots, warm=temperature > 0)


@dataclass(frozen=True, slots=True)
class Read:
    """A piece of one sequence's prompt that a step has read."""

    row: int
    start: int  # absolute position of the first token
    tokens: Tensor  # [count] int64, the token after each position
    slots: Tensor  # [count] int64, target slots
    features: Tensor  # [count, taps * hidden]; of width 0 where no layers are tapped
    follow: bool = True  # False: do not run a network on it, but note that its slots hold nothing of yours


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's logits for the tokens that a step committed, before temperature and filters."""

    places: Tensor  # [positions] int64, indices of the valid entries in the flattened [batch, depth + 1]
    logits: Tensor  # [positions, vocab], the row that each token was chosen from; the receiver may overwrite it


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step made permanent for each sequence of the batch."""

    rows: Tensor  # [batch] int64
    tokens: Tensor  # [batch, depth + 1] int64: accepted tokens, then the bonus token, then -1
    counts: Tensor  # [batch] int64: valid entries of `tokens`
    tree: DraftTree  # the verified tree
    result: VerifyResult
    features: Tensor | None  # [batch, depth + 1, taps * hidden]: target features of root and accepted nodes
    positions: Tensor  # [batch] int64, absolute position of the root
    slots: Tensor  # [batch, depth + 1] int64: target slots of root and accepted nodes; padding is arbitrary
    scores: Scores | None = None  # present if `wants_scores`
    follow: bool = True  # False: run no network on it (see `Read`)
    host: HostMetadata | None = None  # rows and roots on the host


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step, by the device's clock."""

    seconds: float  # whole step
    follow_seconds: float  # part spent in the drafter's `read` and `commit`
    reads_prompts: bool


@dataclass(frozen=True, slots=True)
class RankOutcomes:
    """Recent tokens by class of a rank head: how many candidates were predicted to be right, and how many were."""

    predicted: Mapping[str, float] = field(default_factory=dict)
    right: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Room for past answers, in equal shares, one for each scope."""

    num_bytes: int = 0  # all shares together; 0: no past answers are remembered
    owners: int = 1
    scopes: int = 1  # scopes per owner
    has_keys: bool = False  # whether owners are API keys: requests without one, the server's own, then have no share


Observer = Callable[[Lattice, Tensor, Tensor], None]
"""Receives each forward's nodes with the distributions they were chosen from, before the sampling noise; not called
from captured graphs. # logits [batch, starts, block, draft_vocab], their target ids [draft_vocab] int64"""


def ignore(lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
    """Observe nothing. # logits [batch, starts, block, draft_vocab], ids [draft_vocab]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSizes:
    """Sizes that a drafter allocates for, and server objects that it shares."""

    max_sequences: int
    max_length: int  # tokens per sequence
    max_nodes: int  # nodes per tree
    vocab_size: int = 0
    num_slots: int = 0  # slots in the target's KV pool
    memory: MemorySizes = field(default_factory=MemorySizes)
    device: torch.device | str = "cpu"
    capture: Capture | None = None  # turns a computation into a repeatable graph; None: run eagerly
    ledger: RegretLedger = field(default_factory=RegretLedger)  # the server's; the default is a new one
    observer: Observer = ignore  # called by drafters that have distributions


class Drafter(Protocol):
    """Proposes draft trees and learns from what was accepted. A subclass implements `name`, `start`, `grow` and
    `commit`; the other members have defaults that suit a drafter without a network, which sees tokens only.

    All calls come from the engine thread. A row may be started again as soon as it is finished."""

    @property
    def name(self) -> str:
        """The name under which metrics and results report it, as in the setting `drafter`."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All names that `credits` may ever hold."""
        return (self.name,)

    @property
    def version(self) -> int:
        """Version of the weights that draft now; 0 without weights that are published while serving."""
        return 0

    @property
    def ready(self) -> bool:
        """False while its weights are not initialised: other drafters then draft in its place, while it goes on
        receiving all other calls."""
        return True

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `read` and `commit` get as features, in this order."""
        return ()

    @property
    def reads_prompts(self) -> bool:
        """Whether `read` is called for prompts."""
        return bool(self.tap_layers)

    @property
    def wants_scores(self) -> bool:
        """Whether `commit` gets the target's logits after root and accepted nodes."""
        return False

    @property
    def num_blocks(self) -> int:
        """Blocks drafted so far, by a drafter that drafts in blocks."""
        return 0

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin these sequences; what a row held before is void."""

    def read(self, read: Read) -> None:
        """Process a piece of a prompt; called only if `reads_prompts`."""
        return

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """Return a candidate tree for each row, with an estimate of each node's survival: the probability that the
        target accepts it and all nodes above it. Estimates are corrected later by what comes true, and the budget keeps
        the likeliest nodes. The next call may overwrite the result. # rows [batch] int64 -> trees [batch, nodes]"""

    def commit(self, committed: Committed) -> None:
        """Append the committed tokens to the state, and learn how far the proposals were right. Called in each step,
        also for rows and in steps without a tree."""

    def timed(self, times: StepTimes) -> None:
        """Observe the times of the last committed step; not called for steps outside of serving, such as warm-up."""
        return

    def finish(self, rows: Sequence[int]) -> list[int]:
        """End these sequences. Return for each how many of its committed tokens its `prediction` had right."""
        return [0] * len(rows)

    def on_weights_changed(self) -> None:
        """Called between steps after other weights were published: what was measured of the old ones says little."""
        return

    def forget(self, scope: str | None = None) -> None:
        """Delete past answers of this scope, or of all scopes."""
        return

    def credits(self) -> Mapping[str, int]:
        """Return accepted tokens so far by source, where several drafters make one tree; else nothing."""
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        """Return how right its rank head was lately; empty without one. Waits for the device."""
        return RankOutcomes()

    def memory_counts(self) -> MemoryCounts | None:
        """Return the size and use of its memory of past answers; None without one."""
        return None
