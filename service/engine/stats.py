"""Records of one engine step and of one finished sequence, for metrics; without tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from drafters.memory_counts import MemoryCounts
from service.engine.requests import Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStats:
    """Current load of the engine."""

    num_running: int
    num_waiting: int
    slots_used: int
    slots_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOutlook:
    """Expected gain of drafting for batches like the last step's."""

    sequences: int  # size of the batch, rounded down to a power of two
    gain: float  # expected gain, in plain steps per step
    gain_sd: float
    balance_seconds: float  # balance of drafting's accounts in the ledger
    lost_seconds: float  # lost by steps that lost, since the start


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Record of one engine step, all sequences together."""

    prompt_tokens: int  # prompt tokens computed in this step
    emitted_tokens: int
    drafts: int  # sequences that had at least one drafted node verified
    drafted_nodes: int
    accepted_tokens: int
    accepted_per_sequence: tuple[int, ...]  # accepted length of each of the `drafts`
    accepted_by_source: Mapping[str, int]  # accepted tokens by the drafter that proposed them
    budget_reason: str
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    preemptions: int
    follow_seconds: float = 0.0  # part of `other_seconds`: the drafter reads prompts and commits answers
    itl_seconds: tuple[float, ...] = ()  # inter-token latency of each sequence that emitted
    predicted_verify_seconds: float | None = None  # predicted by the corrected cost table; None without one
    drafting: DraftingOutlook | None = None  # None with a fixed budget
    saved_seconds: float | None = None  # saved against plain decoding, below 0 lost; None: not measured
    verify_rows: int = 0  # rows of the target's forward: prompt tokens, roots and nodes
    drafted_blocks: int = 0
    memory: MemoryCounts | None = None  # since the start; None: the drafter keeps no past answers
    # Reading these waits for the device, hence only in some steps:
    survival_error: float | None = None  # expected calibration error (ECE) of survival
    rank_predicted: Mapping[str, float] = field(
        default_factory=dict
    )  # recent tokens expected to be right, by class of the rank head
    rank_right: Mapping[str, float] = field(default_factory=dict)  # recent tokens that were right, by class

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.draft_seconds + self.verify_seconds + self.other_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishStats:
    """Record of one finished sequence."""

    finish_reason: str
    timings: Timings
    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    output_tokens: int
