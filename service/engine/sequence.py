"""The engine's state of one generation: its text so far, where its keys and values are, what speculation did."""

import time
from dataclasses import dataclass, field

from torch import Tensor

from service.engine.prefix_cache import Lease
from service.engine.requests import FinishReason, GenerationRequest, SpeculationRecord, Timings
from service.engine.sampling import SamplingState
from service.engine.text_stream import TextStream


def signed64(seed: int) -> int:
    """The low 64 bits of a seed as a signed integer, the form tensors hold it in."""
    return (seed + 2**63) % 2**64 - 2**63


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n generations. `tokens` is prompt and generated text; its last token's keys and values are
    computed by the step that chooses the next one."""

    request: GenerationRequest
    index: int
    tokens: list[int]
    sampling: SamplingState
    text: TextStream
    num_prompt: int
    row: int | None = None  # line of the slot table while running
    num_computed: int = 0  # positions whose keys and values are in the pool
    lease: Lease | None = None  # what it uses of the prefix cache while running
    num_cached: int = 0  # prompt tokens whose keys and values it found in the cache
    number: int = 0  # place in the order of arrival
    preemptions: int = 0
    charged_tokens: float = 0.0  # service that was put on its client's account already
    started_seconds: float | None = None
    first_token_seconds: float | None = None
    last_emit_seconds: float | None = None
    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    predicted_tokens: int = 0  # tokens that the client's prediction predicted

    @property
    def table_row(self) -> int:
        """Its line of the slot table, while it runs."""
        assert self.row is not None
        return self.row

    @property
    def client(self) -> str:
        return self.request.client

    @property
    def is_reading(self) -> bool:
        """Whether more of its text is to be read than the token that decoding runs anyway."""
        return self.num_pending > 1

    @property
    def is_publishable(self) -> bool:
        """Whether its text has been read and others may begin with it."""
        return not self.is_reading and self.lease is not None and not self.lease.is_published

    @property
    def cached_slots(self) -> Tensor | None:
        """Slots of the prefix that was in the pool when it began to run. # [cached] int64"""
        return None if self.lease is None else self.lease.slots

    @property
    def num_shared(self) -> int:
        """Positions, from the first on, whose slots belong to the prefix cache."""
        return 0 if self.lease is None else self.lease.length

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens it may still generate."""
        return self.request.sampling.max_tokens - self.num_generated

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def max_nodes(self) -> int | None:
        """The request's own bound on its draft tree."""
        return self.request.speculation.max_budget if self.request.speculation.enabled else 0

    def timings(self, now: float) -> Timings:
        arrival = self.request.arrival_seconds
        started = self.started_seconds if self.started_seconds is not None else now
        first = self.first_token_seconds if self.first_token_seconds is not None else now
        return Timings(started - arrival, first - arrival, now - arrival)

    def mark_started(self) -> None:
        if self.started_seconds is None:
            self.started_seconds = time.monotonic()

    def mark_emitted(self, now: float, accepted: int, drafted: int) -> float | None:
        """Note what a verify emitted; returns the seconds since the last time, None for the first token, which comes
        from reading the prompt and not from a verify."""
        if self.first_token_seconds is None or self.last_emit_seconds is None:
            self.first_token_seconds = self.last_emit_seconds = now
            return None
        self.accepted_per_step.append(accepted)
        self.drafted_per_step.append(drafted)
        gap, self.last_emit_seconds = now - self.last_emit_seconds, now
        return gap

    def speculation(self, drafter: str, version: int) -> SpeculationRecord:
        predicted = min(self.predicted_tokens, self.num_generated)  # what was cut off behind a stop does not count
        return SpeculationRecord(
            accepted_per_step=tuple(self.accepted_per_step),
            drafted_per_step=tuple(self.drafted_per_step),
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=max(0, len(self.request.prediction) - predicted),
            drafter=drafter,
            drafter_version=version,
        )


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended."""

    reason: FinishReason
    stop: int | str | None = None
    error: str | None = None
