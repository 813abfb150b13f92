"""Records of engine steps and finished sequences for metrics; they hold no tensors."""

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
    places_used: int = 0  # places of slots in layers with a window that running sequences still see
    places_total: int = 0  # 0 if these layers keep all slots
    snapshots: int = 0  # cached prefixes with a snapshot of the states of recurrent layers


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOutlook:
    """Expected gain of drafting for batches like the last step's, and the state of its ledger accounts."""

    sequences: int  # batch size, rounded to a power of two
    gain: float  # expected gain, in plain steps per step
    gain_sd: float  # standard deviation of `gain`
    balance_seconds: float  # balance of drafting's accounts in the ledger
    lost_seconds: float  # sum of all losses of steps since the start, without gains


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Record of one engine step, all sequences together."""

    prompt_tokens: int  # prompt tokens computed in this step
    emitted_tokens: int
    drafts: int  # number of sequences with at least one verified node
    drafted_nodes: int
    accepted_tokens: int
    accepted_per_sequence: tuple[int, ...]  # accepted length of each of the `drafts`
    accepted_by_source: Mapping[str, int]  # accepted tokens by the drafter that proposed them
    budget_reason: str  # reason for the number of nodes, one of `budget.REASONS`
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    preemptions: int
    follow_seconds: float = 0.0  # part of `other_seconds` in which the drafter reads prompts and commits tokens
    itl_seconds: tuple[float, ...] = ()  # inter-token latency of each sequence that emitted
    predicted_verify_seconds: float | None = None  # prediction of the corrected cost table; None if none was made
    drafting: DraftingOutlook | None = None  # None with a fixed budget
    saved_seconds: float | None = None  # seconds saved against plain decoding, negative if lost; None if not measured
    verify_rows: int = 0  # rows of the target's forward: prompt tokens, roots and nodes
    discarded_tokens: int = 0  # tokens of sequences that had ended before the step, unknown when it was launched
    drafted_blocks: int = 0  # blocks that the drafter's network generated
    memory: MemoryCounts | None = None  # counts since the start; None if the drafter keeps no past answers
    # The remaining fields are set in few steps only, because reading them waits for the device.
    survival_error: float | None = None  # expected calibration error (ECE) of survival
    # Recent tokens that were expected to be right, and that were right, by class of the rank head:
    rank_predicted: Mapping[str, float] = field(default_factory=dict)
    rank_right: Mapping[str, float] = field(default_factory=dict)

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
