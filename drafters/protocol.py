"""The contract between the engine and drafters, and its records. docs/drafters.md says how to add a kind.

Calls of a decoding step: `grow` proposes trees, the engine verifies them, `commit` reports the committed tokens,
`timed` the duration. A sequence begins with `start` under a row number and ends with `finish`. A step that reads
prompts calls `read` for each chunk."""

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
from kernels.sample import Filters


@dataclass(frozen=True, slots=True)
class DraftContext:
    """A sequence that joins the batch, or rejoins it after preemption, as `Drafter.start` gets it."""

    row: int  # identifies the sequence while it runs: drafters keep their state in tables indexed by it
    tokens: Sequence[int]  # prompt and generated tokens so far
    prediction: Sequence[int] = ()  # the answer that the client expects, if it sent one
    num_generated: int = 0  # number of generated tokens, at the end of `tokens`
    cached: Tensor | None = None  # [cached] int64, target slots of the prefix that is already in the KV pool
    slots: Tensor | None = None  # [positions] int64, in which the target slot of each committed position stands until
    # `Drafter.finish` has returned
    store: bool = True  # False: the sequence may be neither kept nor learned from
    scope: str | None = ""  # scope of the past answers that it reads and adds to, OWNER or OWNER/NAME; None: no scope
    warm: bool = False  # True: its temperature is above 0
    regression: Callable[[], Tensor] | None = None  # reads weights and squares of a memory that drafts too, before the
    # next commit: [2, sets, weights] float32


@dataclass(frozen=True, slots=True)
class HostMetadata:
    """Rows and root positions of a batch on the host, so that drafters need not wait for the device."""

    rows: tuple[int, ...]
    roots: tuple[int, ...]  # absolute positions; in `Noise` the largest possible ones, unless `Drafter.needs_roots`

    @staticmethod
    def of(rows: Tensor, roots: Tensor) -> "HostMetadata":
        """Copy rows and roots from the device; waits for it. # rows, roots [batch] int64"""
        both: list[list[int]] = torch.stack([rows, roots]).tolist()  # planned transfer: not while serving
        return HostMetadata(tuple(both[0]), tuple(both[1]))


@dataclass(frozen=True, slots=True)
class Noise:
    """Keys of each sequence's sampling noise, from which a drafter can compute the noise that the target will use."""

    seeds: Tensor  # [batch] int64
    temperatures: Tensor  # [batch] float32
    positions: Tensor  # [batch] int64, absolute position of the root, whose children are at the next position
    warm: bool = True  # False: no temperature is above 0
    host: HostMetadata | None = None  # rows and roots on the host
    filters: Filters | None = None  # [batch]; None: no token is dropped

    @staticmethod
    def of_text(seed: int, temperature: float, roots: Tensor) -> "Noise":
        """Return the noise keys of one sequence at several roots. # roots [batch] int64, absolute positions"""
        temperatures = torch.full_like(roots, temperature, dtype=torch.float32)
        return Noise(torch.full_like(roots, seed), temperatures, roots, warm=temperature > 0)


@dataclass(frozen=True, slots=True)
class Read:
    """A chunk of one sequence's prompt that the target has read, as `Drafter.read` gets it."""

    row: int
    start: int  # absolute position of the first token
    tokens: Tensor  # [count] int64, the token after each position
    slots: Tensor  # [count] int64, target slots
    features: Tensor  # [count, taps * hidden]; of width 0 where no layers are tapped
    follow: bool = True  # False: run no network on it; the drafter's keys and values in these slots become invalid


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens that one step committed for each sequence of the batch, as `Drafter.commit` gets them."""

    rows: Tensor  # [batch] int64
    tokens: Tensor  # [batch, depth + 1] int64: accepted tokens, then the bonus token, then -1
    counts: Tensor  # [batch] int64: valid entries of `tokens`
    tree: DraftTree  # the verified tree
    result: VerifyResult
    features: Tensor | None  # [batch, depth + 1, taps * hidden]: target features of root and accepted nodes
    positions: Tensor  # [batch] int64, absolute position of the root
    slots: Tensor  # [batch, depth + 1] int64: target slots of root and accepted nodes; padding is arbitrary
    follow: bool = True  # False: run no network on it (see `Read`)
    host: HostMetadata | None = None  # rows and roots on the host
    logits: Tensor | None = None  # [logits, vocab], the target's, before temperature and filters; set if `wants_scores`
    chosen_by: Tensor | None = None  # [batch, depth + 1] int64, index of the logits that chose each token
    past: Tensor | None = None  # [batch, depth + 1, orders, ways] int64, of `kernels.memory.past_lines`


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Durations of a step in seconds, by the device's clock."""

    seconds: float  # of the whole step
    follow_seconds: float  # of the drafter's `read` and `commit` in it
    reads_prompts: bool  # whether the step read prompts
    is_passed: bool = False  # whether another step has been committed since


@dataclass(frozen=True, slots=True)
class RankOutcomes:
    """Accuracy of a rank head by rank class: recent candidates expected to be accepted, and those accepted."""

    predicted: Mapping[str, float] = field(default_factory=dict)
    right: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Size of the memory of past answers, divided into equal shares of which each scope gets one."""

    num_bytes: int = 0  # of all shares together; 0: past answers are not remembered
    owners: int = 1
    scopes: int = 1  # scopes per owner
    has_keys: bool = False  # True: owners are API keys, and requests without a key (the server's own) get no share


Observer = Callable[[Lattice, Tensor, Tensor], None]
"""Callback that receives the nodes of each forward and the logits from which they were chosen, without the sampling
noise. Captured graphs do not call it. # logits [batch, starts, block, draft_vocab], ids [draft_vocab] int64, target
ids"""


def ignore(lattice: Lattice, logits: Tensor, ids: Tensor) -> None:
    """Do nothing: the default observer. # logits [batch, starts, block, draft_vocab], ids [draft_vocab]"""


MIN_SURVIVAL = 1 / 400
"""Survival below which a node never pays: its row costs at least 1/380 of a step (lowest measured: 8B, H200)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSizes:
    """Sizes for which a drafter allocates its tables, and server objects that drafters share."""

    max_sequences: int
    max_length: int  # tokens per sequence
    max_nodes: int  # nodes per tree
    vocab_size: int = 0
    num_slots: int = 0  # slots in the target's KV pool
    memory: MemorySizes = field(default_factory=MemorySizes)
    device: torch.device | str = "cpu"
    capture: Capture | None = None  # captures a computation as a CUDA graph; None: run eagerly
    ledger: RegretLedger = field(default_factory=RegretLedger)  # the server's ledger; by default a new one
    observer: Observer = ignore  # called by drafters that compute logits
    least_survival: float = MIN_SURVIVAL  # survival below which a node is not drafted


class Drafter(Protocol):
    """Proposes draft trees and learns from the accepted tokens. A subclass implements `name`, `start`, `grow` and
    `commit`; the defaults of the other members suit a drafter that reads tokens only.

    All calls come from the engine thread. A finished row may be started again at once."""

    @property
    def name(self) -> str:
        """The drafter's name in metrics and results, spelled as in the setting `drafter`."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All names that may appear in `credits`."""
        return (self.name,)

    @property
    def version(self) -> int:
        """Version of the current weights; 0 if the drafter has no weights that are published while serving."""
        return 0

    @property
    def ready(self) -> bool:
        """False while its weights are not initialised. Another drafter then drafts in its place, but it still receives
        all calls other than `grow`."""
        return True

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `read` and `commit` get as features, concatenated in this order."""
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
    def needs_roots(self) -> bool:
        """Whether `grow` must know the positions of roots on the host. Then no step is launched before the tokens of
        the one before are read."""
        return False

    @property
    def num_blocks(self) -> int:
        """Number of blocks drafted so far; 0 for a drafter that does not draft in blocks."""
        return 0

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Start these sequences, and discard what their rows held before."""

    def read(self, read: Read) -> None:
        """Process a chunk of a prompt; called only if `reads_prompts`."""
        return

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """Return a candidate tree for each row, with an estimate of each node's survival: the probability that the
        target accepts it and all its ancestors. The engine corrects the estimates by acceptance rates, and verifies
        only the likeliest nodes. The next call may overwrite the result. # rows [batch] int64 -> trees [batch,
        nodes]"""

    def commit(self, committed: Committed) -> None:
        """Append the committed tokens to the drafter's state, and learn from the accepted ones. Called in each step,
        even if the step or a row had no tree. Rows that were finished since `grow` are left out, perhaps all."""

    def timed(self, times: StepTimes) -> None:
        """Record the times of the last committed step, or of the one before (`StepTimes.is_passed`). Not called for
        steps outside of serving, such as warm-up."""
        return

    def finish(self, rows: Sequence[int]) -> list[int]:
        """End these sequences. Returns for each the number of its committed tokens that its `prediction` had right."""
        return [0] * len(rows)

    def on_weights_changed(self) -> None:
        """Called between steps after new weights were published, to weigh down what was measured with the old ones."""
        return

    def forget(self, scope: str | None = None) -> None:
        """Delete the past answers of this scope, or of all scopes if it is None."""
        return

    def credits(self) -> Mapping[str, int]:
        """Return the accepted tokens so far by source, if several drafters contribute to one tree; else an empty
        mapping."""
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        """Return the recent accuracy of its rank head, empty without one. Waits for the device."""
        return RankOutcomes()

    def memory_counts(self) -> MemoryCounts | None:
        """Return the size and use of its memory of past answers. Returns None if it has none."""
        return None
