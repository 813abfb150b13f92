"""What the engine asks of a drafter. docs/drafters.md says how to add a kind."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from drafters.lattice import Witness, unwitnessed
from drafters.memory.counts import MemoryCounts
from drafters.regret import RegretLedger
from drafters.tree import Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The text a drafter starts from when a sequence joins (or rejoins after preemption)."""

    row: int  # names the sequence for as long as it runs: drafters keep their state in tables addressed by it
    tokens: Sequence[int]  # prompt and everything generated so far
    prediction: Sequence[int] = ()  # the answer the client expects, when it sent one
    num_generated: int = 0  # how many of `tokens`, at their end, were generated
    cached: Tensor | None = None  # [cached] int64, target slots of the prefix that is in the pool already
    store: bool = True  # False: nothing of it may be kept or learnt from
    scope: str | None = ""  # whose past answers it reads and adds to: that of an owner, or OWNER/NAME; None: no one's
    warm: bool = False  # whether its tokens are drawn, at a temperature above 0


@dataclass(frozen=True, slots=True)
class HostMetadata:
    """What the host knows of a batch without asking the device."""

    rows: tuple[int, ...]
    roots: tuple[int, ...]  # absolute positions

    @staticmethod
    def of(rows: Tensor, roots: Tensor) -> "HostMetadata":
        """Ask the device, for those who keep their books there. # both [batch] int64"""
        both: list[list[int]] = torch.stack([rows, roots]).tolist()  # planned transfer: not while serving
        return HostMetadata(tuple(both[0]), tuple(both[1]))


@dataclass(frozen=True, slots=True)
class Noise:
    """The key of the sampling noise per sequence, so that a drafter can rank by the scores the target will use."""

    seeds: Tensor  # [batch] int64
    temperatures: Tensor  # [batch] float32
    positions: Tensor  # [batch] int64, absolute position of the root; its children sit one further
    warm: bool = True  # False: no temperature is above 0
    host: HostMetadata | None = None  # of rows and roots

    @staticmethod
    def of_text(seed: int, temperature: float, roots: Tensor) -> "Noise":
        """Of one text that was sampled with this seed, behind each of some roots. # roots [batch] int64, absolute"""
        temperatures = torch.full_like(roots, temperature, dtype=torch.float32)
        return Noise(torch.full_like(roots, seed), temperatures, roots, warm=temperature > 0)


@dataclass(frozen=True, slots=True)
class Read:
    """A piece of one sequence's prompt that a step has read."""

    row: int
    start: int  # absolute position of the first
    tokens: Tensor  # [count] int64, the token after each position
    slots: Tensor  # [count] int64, target slots
    features: Tensor  # [count, taps * hidden], of no width where nothing is tapped
    follow: bool = True  # False: a drafter that runs a network on it shall do without


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target made of the tokens that a step committed, before anybody's sampling."""

    places: Tensor  # [positions] int64, of the valid entries in the flattened [batch, depth + 1]
    logits: Tensor  # [positions, vocab], of each of them the row that chose it; the reader's own


@dataclass(frozen=True, slots=True)
class Committed:
    """What one step made permanent for each sequence of the batch."""

    rows: Tensor  # [batch] int64
    tokens: Tensor  # [batch, depth + 1] int64: accepted tokens, then the bonus token, then -1
    counts: Tensor  # [batch] int64: valid entries of `tokens`
    tree: DraftTree  # what was verified
    result: VerifyResult
    features: Tensor | None  # [batch, depth + 1, taps * hidden]: target features of root and accepted nodes
    positions: Tensor  # [batch] int64, absolute position of the root
    slots: Tensor  # [batch, depth + 1] int64: target slots of root and accepted nodes, padded with any
    scores: Scores | None = None  # there if the drafter wants them
    last_logits: Callable[[], Tensor] | None = (
        None  # -> [batch, vocab], what chose each last token; before the next step
    )
    follow: bool = True  # as for `Read`
    host: HostMetadata | None = None  # of rows and roots


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step took as it is served, by when the device got there."""

    seconds: float  # all of it
    follow_seconds: float  # of them, for taking in what was read and committed
    reads_prompts: bool


@dataclass(frozen=True, slots=True)
class RankOutcomes:
    """By class of a rank head: recent tokens that candidates of its ranks were to have right, and those they had."""

    predicted: Mapping[str, float] = field(default_factory=dict)
    right: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySizes:
    """Room for past answers, in equal shares, one for each scope."""

    num_bytes: int = 0  # of all shares; 0: no past answers are remembered
    owners: int = 1
    scopes: int = 1  # of an owner
    has_keys: bool = False  # whether owners are API keys: what comes without one, the server's own, has no share then


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingSizes:
    """Room that a drafter needs, and what it may lose."""

    max_sequences: int
    max_length: int
    max_nodes: int
    vocab_size: int = 0
    num_slots: int = 0
    memory: MemorySizes = field(default_factory=MemorySizes)
    device: torch.device | str = "cpu"
    capture: Capture | None = None  # makes what it computes repeatable; None: it runs as it is
    ledger: RegretLedger = field(default_factory=RegretLedger)  # of the server; by default nobody else's
    witness: Witness = unwitnessed  # of what a drafter says that has distributions


class Drafter(Protocol):
    """Proposes draft trees and observes what became of them. All calls come from the engine thread. What is answered
    here suits a drafter without a network, which reads texts from `start` alone."""

    @property
    def name(self) -> str: ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Everyone whom accepted tokens may ever be credited to."""
        return (self.name,)

    @property
    def version(self) -> int:
        return 0

    @property
    def ready(self) -> bool:
        """Whether it has anything to say: a network whose weights are yet to be made has not."""
        return True

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `commit` wants as features; empty when it wants none."""
        return ()

    @property
    def reads_prompts(self) -> bool:
        """Whether it is to be told of prompts as they are read."""
        return bool(self.tap_layers)

    @property
    def wants_scores(self) -> bool:
        """Whether `commit` wants the target's logits behind root and accepted nodes."""
        return False

    @property
    def num_blocks(self) -> int:
        """Blocks drafted so far, by a drafter that drafts in blocks."""
        return 0

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin (or begin again) drafting for these sequences."""

    def renew(self) -> None:
        """Other weights draft from now on: what the old ones gained says little of them."""
        return

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        """Candidates for each sequence, named by row; the next call may overwrite them. # rows [batch] int64"""

    def read(self, read: Read) -> None:
        """Take in a piece of a prompt; called only where `reads_prompts` asks for it."""
        return

    def commit(self, committed: Committed) -> None:
        """Extend the state by what was committed, and learn how far the proposals were right."""

    def timed(self, times: StepTimes) -> None:
        """What the step took whose tokens were committed last; not called where that says nothing of serving."""
        return

    def finish(self, rows: Sequence[int]) -> list[int]:
        """Forget these sequences; says how many committed tokens of each its prediction had predicted since `start`."""
        return [0] * len(rows)

    def forget(self, scope: str | None = None) -> None:
        """Forget past answers of this scope, or of all; what keeps none has nothing to forget."""
        return

    def credits(self) -> Mapping[str, int]:
        """Accepted tokens so far by who proposed them, where several drafters make one tree; else empty."""
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        """How its rank head has done lately; waits for the device. Empty without such a head."""
        return RankOutcomes()

    def memory_counts(self) -> MemoryCounts | None:
        """What its memory of past answers holds and has been good for; None where it has none."""
        return None
