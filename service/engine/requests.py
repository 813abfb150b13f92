"""Requests and outputs: the records exchanged between the HTTP server and the engine."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

from service.sampling_params import SamplingParams as SamplingParams
from service.text.grammars import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Scope:
    """Identifies the sender of a request by keyed hashes, which reveal no API keys, user names or addresses.
    `Server.scope_of` creates it once per request. Its properties are the only rules about what requests share: stored
    responses, cached prefixes, past answers and accounts.

    Only the API key is authenticated, so only the key separates senders. A name is a claim of the key's holder; without
    configured keys anyone can claim any name.
    """

    key: str = ""  # hash of the API key; "" without configured keys: one scope for all senders
    name: str = ""  # hash of `safety_identifier`, else of `user`, else of the sender's address
    separate_names: bool = False  # setting `prefix_cache: per_client`
    address: str = ""  # hash of the sender's address
    max_running: int | None = None  # maximum of running sequences of the account: setting `max_concurrent` of the key

    @property
    def owner(self) -> str:
        """Owner of the responses that this sender stores; only the owner may read, continue and delete them."""
        return self.key

    @property
    def cache_namespace(self) -> str:
        """Namespace of the prefix cache and of past answers, shared by the requests that have the same one."""
        return f"{self.key}/{self.name}" if self.separate_names else self.key

    def past(self, *, shown: bool) -> str | None:
        """Namespace of the past answers that a request reads and extends. `shown`: whether the client sees the drafts.
        Returns None if the request must not use past answers: shown drafts must come from the client's own texts, which
        only an API key proves."""
        return None if shown and not self.key else self.cache_namespace

    @property
    def account(self) -> str:
        """Account that fair scheduling charges for tokens and the learner for samples: the key, or else the address.
        Names do not count, because a client can claim any number of them."""
        return self.key or self.address


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """A request's limits on speculation; they change its speed, never its text."""

    enabled: bool = True
    max_budget: int | None = None  # maximum of nodes verified per step; None leaves the choice to the engine
    trace: bool = False  # whether each output carries the tree that was verified


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and the parameters of its continuations. `n` sequences are generated; sequence i samples with
    seed + i."""

    request_id: str
    prompt: Tokens[int]
    sampling: SamplingParams
    n: int = 1
    prediction: Tokens[int] = ()  # the client's prediction of the answer, used for drafting
    grammar: Grammar | None = None  # grammar that the text must match
    speculation: SpeculationParams = SpeculationParams()
    store: bool = True  # whether the text may be recorded and learnt from
    scope: Scope = field(default_factory=Scope)
    # Among the requests of one client, lower values start first; if slots run out, the highest of all is preempted.
    priority: int = 0
    replayed: Tokens[Tokens[int]] = ()  # tokens of an earlier answer that a resumed stream replays, by sequence
    messages_end: int | None = None  # number of leading prompt tokens before a generation prompt; None without one
    scores_prompt: bool = False  # whether the first output carries the log-probabilities of the prompt's tokens
    single_token_outputs: int = 0  # number of leading tokens per sequence that are each sent as an output of their own
    arrival_seconds: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class Submission:
    """The engine requests of one HTTP request body, all of one client and priority. They wait as one queue entry."""

    requests: Tokens[GenerationRequest]
    waits: bool = True  # whether any sequence has not started yet; set by the engine


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target's unprocessed distribution, with alternatives."""

    token_id: int
    logprob: float
    rank: int  # rank of the token, 1 for the target's likeliest
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class StepTree:
    """Draft tree of one step as it was verified; empty if nothing was drafted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]  # index of the parent node, always an earlier one; -1 below the root
    survival: tuple[float, ...]
    path: tuple[int, ...]  # indices of the accepted nodes, from the root down


@dataclass(frozen=True, slots=True)
class SpeculationRecord:
    """Speculation statistics of one finished sequence."""

    accepted_per_step: tuple[int, ...]  # accepted length of each verify step
    drafted_per_step: tuple[int, ...]  # nodes verified in each step
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    drafter: str
    drafter_version: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from a request's arrival until its sequence started, emitted its first token, and ended."""

    queue_seconds: float
    first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """Tokens and text that one step added to one sequence. The last output of a sequence also carries `finish_reason`
    and totals.

    `text` can be shown at once: it never splits a character, and text that may begin a stop string is held back for a
    later output. So it can be empty although `token_ids` is not."""

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
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # one for each prompt token but the first, with `scores_prompt`

    @property
    def is_cut(self) -> bool:
        """Whether the text was ended by a length limit, a stop string or token, an abort or a failure, and not by the
        model's own end token."""
        return self.finish_reason not in (None, "stop") or self.stop_reason is not None
