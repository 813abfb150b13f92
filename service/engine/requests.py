"""Requests and outputs: the records that travel between the HTTP side and the engine."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

from service.sampling_params import SamplingParams as SamplingParams
from service.text.grammars import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Scope:
    """The sender of a request, as keyed hashes that reveal no keys, user names or addresses. It decides who shares what
    of a request with whom: `Server.scope_of` makes it once per request, and nothing else has rules of its own.

    Only the key is authenticated, so only the key separates senders. A name is a claim of the key's holder; without
    configured keys anyone can claim any name.
    """

    key: str = ""  # hash of the API key; "" without configured keys: one scope for all senders
    name: str = ""  # hash of `safety_identifier`, else of `user`, else of the sender's address
    separate_names: bool = False  # setting `prefix_cache: per_client`
    address: str = ""  # hash of the sender's address
    max_running: int | None = None  # most running sequences of its account: `max_concurrent` of the key

    @property
    def owner(self) -> str:
        """Owner of stored responses, who alone may read, continue and delete them."""
        return self.key

    @property
    def cache_namespace(self) -> str:
        """Namespace of the prefix cache and of past answers that a request reads and fills."""
        return f"{self.key}/{self.name}" if self.separate_names else self.key

    def past(self, *, shown: bool) -> str | None:
        """The scope of past answers that a request reads and extends; `shown`: its client sees the drafts. None: no
        past answers, because drafts that are shown must be the client's own, and only a key proves that."""
        return None if shown and not self.key else self.cache_namespace

    @property
    def account(self) -> str:
        """Account charged for tokens by fairness and for samples by the learner: the key or address. Names do not
        count, because a client can claim any number of them."""
        return self.key or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """A request's limits on speculation; they change its speed, never its text."""

    enabled: bool = True
    max_budget: int | None = None  # most nodes verified per step; None = whatever the engine chooses
    trace: bool = False  # each output carries the tree that was verified


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it. `n` sequences are generated; sequence i samples with seed + i."""

    request_id: str
    prompt: Tokens[int]
    sampling: SamplingParams
    n: int = 1
    prediction: Tokens[int] = ()
    grammar: Grammar | None = None  # grammar that the text must match
    speculation: SpeculationParams = SpeculationParams()
    store: bool = True  # False: neither recorded nor learnt from
    scope: Scope = field(default_factory=Scope)
    # Lower starts earlier among the requests of one client; if slots run out, the highest of all is preempted.
    priority: int = 0
    replayed: Tokens[Tokens[int]] = ()  # per sequence: tokens of an earlier answer that a resumed stream replays
    scores_prompt: bool = False  # send the log-probabilities of its tokens with the first output
    single_token_outputs: int = 0  # number of first tokens per sequence that are outputs of their own
    arrival_seconds: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Submission:
    """The requests of one body, all of one client and priority. They wait as one entry."""

    requests: Tokens[GenerationRequest]
    waits: bool = True  # whether a sequence has not started yet; written by the engine


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target's unprocessed distribution, with alternatives."""

    token_id: int
    logprob: float
    rank: int  # 1 = the target's likeliest token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class StepTree:
    """Draft tree of one step as it was verified; empty where nothing was drafted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index of the parent node, always an earlier one; -1 below the root
    survival: tuple[float, ...]
    path: tuple[int, ...]  # indices of the accepted nodes, from the root down


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """Speculation statistics of one sequence."""

    accepted_per_step: tuple[int, ...]  # accepted length of each verify step
    drafted_per_step: tuple[int, ...]  # nodes verified in each step
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    drafter: str
    drafter_version: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds a sequence spent waiting, until its first token, and in all."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """Tokens and text that one step added to one sequence. The last output of a sequence carries `finish_reason` and
    totals.

    `text` may be shown now: it never splits a character, and text that may begin a stop string is held back, so it can
    be empty where `token_ids` is not."""

    request_id: str
    index: int  # index among the request's n sequences
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    speculation: SpeculationRecord | None = None
    timings: Timings | None = None
    cached_tokens: int = 0
    tree: StepTree | None = None  # only for requests with `trace`
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # all prompt tokens but the first, for requests that ask

    @property
    def is_cut(self) -> bool:
        """Whether a length limit, a stop or a failure ended the text, not the model."""
        return self.finish_reason not in (None, "stop") or self.stop_reason is not None
