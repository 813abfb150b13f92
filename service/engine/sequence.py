"""The engine's state of one generation: its text so far, where its keys and values are, what speculation did."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from service.engine.gains import TextGain
from service.engine.prefix_cache import Lease
from service.engine.requests import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationRecord,
    Timings,
    TokenLogprob,
)
from service.engine.sampling import SamplingState
from service.tokenizer import IncrementalDetokenizer


class TextStream:
    """Text that is fed token by token and taken in pieces which never begin a stop string unnoticed.

    The stop string that is complete first wins (the longest, when several end at the same character), which makes the
    result independent of how the text is cut into tokens.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pending = ""  # not yet taken; a stop string that is still possible begins in here
        self._searched = 0  # characters of `_pending` in which no stop string may end any more
        self._stopped = False

    def push(self, token_id: int) -> str | None:
        """Feed one token; the stop string that is now complete, if one is. Nothing may be pushed after that."""
        assert not self._stopped, "pushed a token after a stop string"
        self._num_tokens += 1
        return self._append(self._detokenizer.push(token_id))

    def take(self) -> str:
        """Text that may be shown now."""
        shown = len(self._pending) if self._stopped else self._first_possible_stop()
        return self._cut(shown)

    def finish(self) -> str:
        """All the rest; to be called once, after the last token."""
        if not self._stopped:
            self._append(self._detokenizer.flush())
        return self._cut(len(self._pending))

    def _append(self, text: str) -> str | None:
        self._pending += text
        if self._num_tokens > self._min_tokens and (match := self._first_stop()) is not None:
            start, stop = match
            self._pending = self._pending[: start + len(stop) if self._include_stop else start]
            self._stopped = True
            return stop
        self._searched = len(self._pending)
        return None

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the earliest stop string begins, and which one it is."""
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._pending.find(stop, max(0, self._searched + 1 - len(stop)))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return found and found[1:]

    def _first_possible_stop(self) -> int:
        """Where text begins that could still become a stop string."""
        for start in range(len(self._pending)):
            rest = self._pending[start:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stop):
                return start
        return len(self._pending)

    def _cut(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._searched = max(0, self._searched - length)
        return text


@dataclass(slots=True)
class Account:
    """What steps took of one sequence and brought it."""

    first_version: int = -1  # drafter that served its first step
    version: int = -1  # and its last
    accepted: list[int] = field(default_factory=list)  # of each step with nodes
    plain_steps: int = 0
    seconds: float = 0.0

    def served_by(self, version: int) -> None:
        self.version = version
        if self.first_version < 0:
            self.first_version = version


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
    account: Account = field(default_factory=Account)
    gain: TextGain = field(default_factory=TextGain)
    prompt_scores: dict[int, TokenLogprob] = field(default_factory=dict)  # by position, until they are sent

    @property
    def table_row(self) -> int:
        """Its line of the slot table, while it runs."""
        assert self.row is not None
        return self.row

    @property
    def client(self) -> str:
        """The account that fairness charges."""
        return self.request.scope.account

    @property
    def cache_namespace(self) -> str:
        if self.request.scores_prompt:  # each token of it is to be read
            return f"scored {self.request.request_id} {self.index}"
        return self.request.scope.cache_namespace

    @property
    def is_reading(self) -> bool:
        """Whether more of its text is to be read than the token that decoding runs anyway."""
        return self.num_pending > 1

    @property
    def num_shared(self) -> int:
        """Positions, from the first on, whose slots belong to the prefix cache."""
        return 0 if self.lease is None else self.lease.length

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def known_tokens(self) -> Items[int]:
        """The tokens that come next, if it says again what it has said before."""
        said = self.request.said[self.index] if self.request.said else ()
        count = self.num_generated
        return said[count:] if len(said) > count and list(said[:count]) == self.tokens[self.num_prompt :] else ()

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

    def take_prompt_scores(self) -> tuple[TokenLogprob, ...]:
        """Of all tokens of the prompt but the first."""
        scores, self.prompt_scores = self.prompt_scores, {}
        return tuple(scores[position] for position in range(1, self.num_prompt))

    def mark_verified(self, accepted: int, drafted: int) -> None:
        """Note what became of its tree in a step."""
        self.accepted_per_step.append(accepted)
        self.drafted_per_step.append(drafted)

    def mark_emitted(self, now: float) -> float | None:
        """Note that a step emitted; returns the seconds since the last time, None for the first token."""
        if self.first_token_seconds is None or self.last_emit_seconds is None:
            self.first_token_seconds = self.last_emit_seconds = now
            return None
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
