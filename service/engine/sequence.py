"""The engine's state of one generation: its tokens and text so far, its slots, and its speculation statistics."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from service.engine.draft_gate import SequenceGain, traffic_class
from service.engine.kv_pool import SlotTable
from service.engine.prefix_cache import PrefixLease, Running
from service.engine.requests import FinishReason, GenerationRequest, SamplingParams, TokenLogprob
from service.engine.sampling import SamplingState, drops_tokens
from service.text.tokenizer import IncrementalDetokenizer

_SEARCHED_RUN = 256  # maximum number of held byte tokens that are searched for a stop string after each token


class TextStream:
    """Detokenizes token by token, and holds back text that may begin a stop string.

    The text ends at the stop string that is complete first; if several end at the same character, at the longest one.
    So the result does not depend on how the text is split into tokens.
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
        """Append one token. Returns the stop string that it completes, or None. No token may follow a stop string."""
        assert not self._stopped, "pushed a token after a stop string"
        self._num_tokens += 1
        self._unread.append(token_id)
        if not self._stop:
            return None  # `take` detokenizes all tokens of a step at once
        self._read()
        held = self._detokenizer.held if self._detokenizer.num_held <= _SEARCHED_RUN else ""
        return self._search(self._pending if "\ufffd" in held else self._pending + held)

    def take(self) -> str:
        """Remove and return the text that may be shown now."""
        self._read()
        shown = len(self._pending) if self._stopped else self._first_possible_stop()
        return self._cut(shown)

    def finish(self) -> str:
        """Remove and return the rest of the text; to be called once, after the last token."""
        self._read()
        if not self._stopped:
            self._pending += self._detokenizer.held
            self._search(self._pending)
        return self._cut(len(self._pending))

    def _read(self) -> None:
        self._pending += self._detokenizer.push(*self._unread)
        self._unread.clear()

    def _search(self, text: str) -> str | None:
        """End the text at the first stop string in the pending text. Returns that stop string, or None."""
        if self._num_tokens > self._min_tokens and (match := self._first_stop(text)) is not None:
            start, stop = match
            self._pending = text[: start + len(stop) if self._include_stop else start]
            self._stopped = True
            return stop
        self._searched = len(text)
        return None

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Start and value of the stop string that ends first. Returns None if there is none."""
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, self._searched + 1 - len(stop)))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return found and found[1:]

    def _first_possible_stop(self) -> int:
        """Index in the pending text from which on it could still become a stop string."""
        for start in range(len(self._pending)):
            rest = self._pending[start:]
            if any(len(rest) < len(stop) and stop.startswith(rest) for stop in self._stop):
                return start
        return len(self._pending)

    def _cut(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._searched = max(0, self._searched - length)
        return text


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n generations. `tokens` holds the prompt and the generated tokens; the keys and values of the
    last token are computed by the step that chooses the next one."""

    request: GenerationRequest
    index: int
    tokens: list[int]
    num_prompt: int
    sampling: SamplingState = field(init=False)  # exists while the sequence runs
    text: TextStream = field(init=False)  # exists since the sequence started for the first time
    row: int | None = None  # row of the slot table; None unless the sequence runs
    num_computed: int = 0  # number of leading positions whose keys and values are in the pool, or will be by launched
    # steps, without their nodes
    lease: PrefixLease | None = None  # lease on the prefix cache; None unless the sequence runs
    num_cached: int = 0  # prompt tokens whose keys and values were found in the cache
    arrival: int = 0  # rank in the order of arrival
    preemptions: int = 0
    has_ended: bool = False  # whether the scheduler has removed it
    needs_host: bool = False  # whether its next step needs its newest token on the host, or its output more than tokens
    steps_in_flight: int = 0  # launched steps with rows of it whose tokens have not been read
    charged_tokens: float = 0.0  # service already added to its client's counter
    started_seconds: float | None = None
    first_token_seconds: float | None = None
    last_emit_seconds: float | None = None
    accepted_per_step: list[int] = field(default_factory=list)  # accepted length of each decoding step
    drafted_per_step: list[int] = field(default_factory=list)  # nodes verified in each decoding step
    predicted_tokens: int = 0  # number of accepted tokens from the client's prediction
    charged_seconds: float = 0.0  # seconds charged by `accounting.charge`, for learning; NaN if unknown
    first_version: int = -1  # drafter version of the first charged step; -1 before it
    version: int = -1  # drafter version of the last charged step
    gain: SequenceGain = field(default_factory=SequenceGain)
    prompt_scores: dict[int, TokenLogprob] = field(default_factory=dict)  # unsent scores of prompt tokens by position

    @property
    def table_row(self) -> int:
        """Row of the slot table; the sequence must be running."""
        assert self.row is not None
        return self.row

    @property
    def client(self) -> str:
        """Client to whose fairness counter the sequence is charged."""
        return self.request.scope.account

    @property
    def cache_namespace(self) -> str:
        """Namespace of the prefix cache. It is unique to this sequence if the prompt is scored, because then every
        prompt token must be computed."""
        if self.request.scores_prompt:
            return f"scored {self.request.request_id} {self.index}"
        return self.request.scope.cache_namespace

    @property
    def is_prefilling(self) -> bool:
        """Whether keys and values of tokens before the last one are still to be computed."""
        return self.num_pending > 1

    @property
    def num_shared(self) -> int:
        """Number of leading positions whose slots belong to the prefix cache."""
        return 0 if self.lease is None else self.lease.length

    @property
    def num_generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def replay_tokens(self) -> Items[int]:
        """Remaining tokens of the earlier answer that a resumed stream replays; empty if the new tokens differ from
        it."""
        if not self.request.replayed:
            return ()
        before, count = self.request.replayed[self.index], self.num_generated
        return before[count:] if len(before) > count and list(before[:count]) == self.tokens[self.num_prompt :] else ()

    @property
    def num_remaining(self) -> int:
        """Number of tokens that the sequence may still generate."""
        return self.request.sampling.max_tokens - self.num_generated

    @property
    def num_pending(self) -> int:
        """Number of tokens whose keys and values are still to be computed; 1 while decoding, 0 while a launched step
        chooses the next one."""
        return len(self.tokens) - self.num_computed

    @property
    def awaits_token(self) -> bool:
        """Whether a launched step chooses the newest token of this running sequence."""
        return self.num_pending == 0

    @property
    def must_end(self) -> bool:
        """Whether the sequence ends with the step that is launched, because of its length."""
        return self.awaits_token and self.num_remaining <= 1

    @property
    def num_until_end(self) -> int:
        """Number of pending tokens up to the next position after which the prefix cache wants a snapshot, or of all."""
        ends = () if self.lease is None else self.lease.ends
        later = [end - self.num_computed for end in ends if end > self.num_computed]
        return min(self.num_pending, *later) if later else self.num_pending

    @property
    def max_nodes(self) -> int | None:
        """Maximum number of nodes of the draft tree by the request: 0 without speculation, None without a limit."""
        return self.request.speculation.max_budget if self.request.speculation.enabled else 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason for the end of a generation."""

    reason: FinishReason
    stop: int | str | None = None  # stop token or stop string that ended it
    error: str | None = None  # message for the client


def new_sequence(request: GenerationRequest, index: int) -> Sequence:
    """Create a sequence that has not started yet."""
    params, has_grammar = request.sampling, request.grammar is not None
    traffic = traffic_class(params.temperature, has_grammar=has_grammar, is_filtered=drops_tokens(params))
    gain = SequenceGain(traffic, may_draft=request.speculation.enabled and request.speculation.max_budget != 0)
    by_token = has_grammar or params.has_penalties or params.min_tokens > 0 or bool(request.replayed)
    shows_more = params.num_logprobs is not None or request.speculation.trace
    prompt, needs_host = list(request.prompt), by_token or shows_more
    return Sequence(request, index, prompt, len(prompt), gain=gain, needs_host=needs_host)


def in_cache(sequence: Sequence, table: SlotTable) -> Running:
    """Describe a running sequence to the prefix cache."""
    assert sequence.lease is not None, "a running sequence has a lease"
    return sequence.lease, sequence.num_computed, sequence.tokens, table.slots[sequence.table_row]
