"""The engine's state of one generation: its tokens and text so far, its slots, what speculation did for it."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from service.engine.draft_gate import SequenceGain, traffic_class
from service.engine.prefix_cache import PrefixLease
from service.engine.requests import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from service.engine.sampling import SamplingState
from service.text.tokenizer import IncrementalDetokenizer

_SEARCHED_RUN = 256  # most held byte tokens that are searched for a stop string at each token


class TextStream:
    """Detokenizes token by token and holds back text that may begin a stop string.

    The stop string that is complete first wins, the longest of several that end at the same character: so the result
    does not depend on how the text is cut into tokens.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams) -> None:
        self._detokenizer = detokenizer
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._unread: list[int] = []  # tokens that are not detokenized yet
        self._pending = ""  # text not yet taken, which may begin a stop string
        self._searched = 0  # leading characters of `_pending` in which no stop string can end
        self._stopped = False

    def push(self, token_id: int) -> str | None:
        """Append one token; return the stop string it completes, if any. Nothing may be pushed after a stop string."""
        assert not self._stopped, "pushed a token after a stop string"
        self._num_tokens += 1
        self._unread.append(token_id)
        if not self._stop:
            return None  # read when the text is taken, all tokens of a step at once
        self._read()
        held = self._detokenizer.held if self._detokenizer.num_held <= _SEARCHED_RUN else ""
        return self._search(self._pending if "\ufffd" in held else self._pending + held)

    def take(self) -> str:
        """Remove and return the text that may be shown now."""
        self._read()
        shown = len(self._pending) if self._stopped else self._first_possible_stop()
        return self._cut(shown)

    def finish(self) -> str:
        """Remove and return the rest; to be called once, after the last token."""
        self._read()
        if not self._stopped:
            self._pending += self._detokenizer.held
            self._search(self._pending)
        return self._cut(len(self._pending))

    def _read(self) -> None:
        self._pending += self._detokenizer.push(*self._unread)
        self._unread.clear()

    def _search(self, text: str) -> str | None:
        """End the text at the first stop string in the pending text. # -> the stop string, if any"""
        if self._num_tokens > self._min_tokens and (match := self._first_stop(text)) is not None:
            start, stop = match
            self._pending = text[: start + len(stop) if self._include_stop else start]
            self._stopped = True
            return stop
        self._searched = len(text)
        return None

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Start and value of the earliest stop string."""
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, self._searched + 1 - len(stop)))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return found and found[1:]

    def _first_possible_stop(self) -> int:
        """Start of the text that could still become a stop string."""
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
class QueryCosts:
    """Cost and accepted tokens of one sequence's steps, for learning."""

    first_version: int = -1  # drafter version of its first step; -1 before
    version: int = -1  # drafter version of its last step
    accepted: list[int] = field(default_factory=list)  # accepted length of each step with nodes
    plain_steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n generations. `tokens` is prompt and generated text; keys and values of the last token are
    computed by the step that chooses the next one. Sampling state and text stream are created when it starts."""

    request: GenerationRequest
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingState = field(init=False)  # exists while the sequence runs
    text: TextStream = field(init=False)  # exists from the first start on
    row: int | None = None  # row of the slot table, while running
    num_computed: int = 0  # positions whose keys and values are in the pool
    lease: PrefixLease | None = None  # lease on the prefix cache, while running
    num_cached: int = 0  # prompt tokens whose keys and values were found in the cache
    arrival: int = 0  # rank in the order of arrival
    preemptions: int = 0
    charged_tokens: float = 0.0  # service already added to its client's counter
    started_seconds: float | None = None
    first_token_seconds: float | None = None
    last_emit_seconds: float | None = None
    accepted_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    predicted_tokens: int = 0  # generated tokens that the client's prediction had right
    costs: QueryCosts = field(default_factory=QueryCosts)
    gain: SequenceGain = field(default_factory=SequenceGain)
    prompt_scores: dict[int, TokenLogprob] = field(default_factory=dict)  # scores by position, until they are sent

    @property
    def table_row(self) -> int:
        """Its row of the slot table, while it runs."""
        assert self.row is not None
        return self.row

    @property
    def client(self) -> str:
        """The client whose fairness counter it is charged to."""
        return self.request.scope.account

    @property
    def cache_namespace(self) -> str:
        """Namespace of the prefix cache; one of its own where every prompt token must be computed to be scored."""
        if self.request.scores_prompt:
            return f"scored {self.request.request_id} {self.index}"
        return self.request.scope.cache_namespace

    @property
    def is_prefilling(self) -> bool:
        """Whether tokens before the last one are still to be computed."""
        return self.num_pending > 1

    @property
    def num_shared(self) -> int:
        """Positions, from the first on, whose slots belong to the prefix cache."""
        return 0 if self.lease is None else self.lease.length

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def replay_tokens(self) -> Items[int]:
        """Rest of the prefix that a resumed stream replays; empty once the text has left it."""
        before = self.request.replayed[self.index] if self.request.replayed else ()
        count = self.num_generated
        return before[count:] if len(before) > count and list(before[:count]) == self.tokens[self.num_prompt :] else ()

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
        """The request's limit on its draft tree; 0: no speculation, None: no limit."""
        return self.request.speculation.max_budget if self.request.speculation.enabled else 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended."""

    reason: FinishReason
    stop: int | str | None = None
    error: str | None = None


def new_sequence(request: GenerationRequest, index: int) -> Sequence:
    """A sequence that has not started."""
    kind = traffic_class(request.sampling.temperature, has_grammar=request.grammar is not None)
    gain = SequenceGain(kind, may_draft=request.speculation.enabled and request.speculation.max_budget != 0)
    return Sequence(request, index, list(request.prompt), len(request.prompt), gain=gain)
