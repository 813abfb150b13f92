"""Every knob of learning while serving, written once, with the symbol or section of the paper behind it.

The paper is SpecBlock (arXiv 2605.07243), section 3.4 and appendix A.3. Values are checked here and nowhere else; no
class takes this object: `adaptation/build.py` unpacks it.

How many cores there are to compute on, for those who share them."""

import os
import sys
from typing import Any, Literal, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

PolicyName = Literal["bandit", "always", "head_only", "full_only", "never"]


def _knob(default: Any, description: str, **limits: float) -> Any:
    return Field(default=default, description=description, **limits)  # type: ignore[call-overload]


class AdaptationConfig(BaseModel):
    """What an operator may turn about learning; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    enabled: bool = Field(
        default=False,
        description="Learn from the traffic that is served. It changes the speed of an answer, never its text.",
    )
    policy: PolicyName = Field(
        default="bandit",
        description="Who decides about updates. bandit: the expected gain (algorithm 1). always: a full update every "
        "always_queries (Online Speculative Decoding). head_only, full_only: that update whenever its buffer is full. "
        "never: the drafter stays as it is.",
    )

    alpha: float = _knob(
        0.10,
        "Least weight of a new measurement in the value of an arm (alpha); the first ones count as in a mean.",
        gt=0,
        le=1,
    )
    min_signal: float = _knob(5.0, "Updates triggered by less signal say nothing about their arm (s_min).", ge=0)
    warm_up_queries: int = _knob(10, "Queries before the first decision: they give the first baseline.", ge=1)
    cold_start_events: int = _knob(8, "Updates over which exploring falls from its first to its last rate.", ge=1)
    epsilon_start: float = _knob(
        0.30, "Share of queries, at most, that explore in the beginning where an arm pays (epsilon).", ge=0, le=1
    )
    epsilon_end: float = _knob(0.10, "The same from the end of the cold start on (epsilon).", ge=0, le=1)
    explore_queries: float = _knob(
        8.0,
        "What exploring may cost at once, in queries' serving time: at the start, and again when traffic has changed.",
        ge=0,
    )
    explore_share: float = _knob(
        0.01, "Share of serving time that exploring may cost in the long run, where it brings nothing.", ge=0, le=1
    )
    blocked_queries: int = _knob(
        2,
        "Queries after an update that old and new drafter share: not measured, nor learnt from while others are to be.",
        ge=0,
    )
    measured_queries: int = _knob(10, "Queries before and after an update whose throughput is compared (N).", ge=1)
    measured_seconds: float = _knob(
        900.0, "A measurement that takes longer is dropped: it would compare different traffic.", gt=0
    )
    payback_queries: int = _knob(
        200,
        "Queries after which an update shall have paid for its time; N would charge all of it to the measured.",
        ge=1,
    )
    head_queries: int = _knob(4, "Queries in the buffer of the head update (draft head and rank head).", ge=1)
    full_queries: int = _knob(8, "Queries in the buffer of the full update.", ge=1)
    always_queries: int = _knob(8, "Queries between two updates of the policy `always`.", ge=1)

    anchor_weight: float = _knob(0.01, "Weight of the divergence from the anchor drafter in the loss (lambda).", ge=0)
    head_learning_rate: float = _knob(2e-4, "Learning rate of head updates, at most.", gt=0)
    full_learning_rate: float = _knob(2e-4, "Learning rate of full updates, at most.", gt=0)
    head_steps: int = _knob(4, "Optimizer steps of a head update, all on the same buffer.", ge=1, le=64)
    full_steps: int = _knob(
        12, "Optimizer steps of a full update, which goes through its texts as often as it takes.", ge=1, le=1024
    )
    resting_share: float = _knob(
        0.125,
        "Share of queries that are recorded while nothing promises a gain, to notice when that changes: recording "
        "costs 1 to 2 % of throughput.",
        gt=0,
        le=1,
    )
    rehearsed_texts: int = _knob(
        64, "Latest texts that were learnt from, some of which each full update hears again.", ge=0
    )
    exchange_count: int = _knob(
        2,
        "Times that a token outside the draft vocabulary must have been said more often than one inside to take its "
        "place in an update; 0: the drafter proposes from the deployed vocabulary for ever.",
        ge=0,
    )
    step_texts: int = _knob(2, "Texts per optimizer step of a full update.", ge=1)
    warm_up_steps: int = _knob(
        8, "Optimizer steps over which the learning rate rises: the first ones know nothing of its moments.", ge=1
    )
    gradient_norm: float = _knob(1.0, "Gradients are scaled down to this norm.", gt=0)
    update_norm: float = _knob(0.02, "An update moves the weights by at most this share of their norm.", gt=0, le=1)
    kept_refusals: int = _knob(
        8,
        "Times in a row that a refused candidate which is not clearly worse is trained on: small updates add up.",
        ge=0,
    )
    target_top: int = _knob(64, "Tokens of the target's distribution kept per rejected position.", ge=1, le=1024)
    buffer_positions: int = _knob(
        4096, "Rejected positions kept for learning, in all; the oldest make room for new ones.", ge=64
    )
    window_tokens: int = _knob(256, "Longest stretch of a text that a full update sees.", ge=16)
    train_device: str = Field(
        default="same",
        description="Where updates are computed: same (beside the target), cpu, cuda or cuda:N.",
        pattern=r"^(same|cpu|cuda(:\d+)?)$",
    )
    queued_queries: int = _knob(256, "Finished queries that wait to be heard; the oldest make room.", ge=1)
    train_in: Literal["auto", "process", "thread"] = Field(
        default="auto",
        description="What computes updates. process: one of its own, which takes next to nothing from serving (CPU, "
        "Linux). thread: one of the server's, which shares its interpreter. auto: a process where that can be had and "
        "the drafter is not tiny.",
    )
    train_threads: int = _knob(1, "CPU threads of an update.", ge=1, le=64)
    train_niceness: int = _knob(
        10,
        "How far the learning thread steps back from the CPU (Linux nice value): 0 not at all, 19 most.",
        ge=0,
        le=19,
    )
    duty_cycle: float = _knob(
        0.25,
        "Largest share of time that updates may take from serving; on cores that serving leaves free they take none.",
        gt=0,
        le=1,
    )

    held_back_share: float = _knob(0.25, "Share of queries kept for judging and never learnt from.", gt=0, lt=1)
    held_back_sequences: int = _knob(24, "Most recent held-back sequences that are replayed.", ge=4)
    replay: Literal["blocks", "tree"] = Field(
        default="blocks",
        description="How held-back sequences are replayed. blocks: a small tree of one block from every other "
        "position, fast. tree: trees as they are served, with the rank head; tens of times slower.",
    )
    probe_texts: int = _knob(8, "Held-back sequences, the first ones, on which drift is measured.", ge=1)
    gate_sequences: int = _knob(8, "Least number of held-back sequences for a publish.", ge=4)
    gate_standard_errors: float = _knob(
        1.25,
        "Standard errors by which a candidate must beat the serving drafter; above 1 no single text decides.",
        ge=0,
    )
    cusum_slack: float = _knob(0.5, "Fall per window that the alarm forgives, in standard errors (k).", ge=0)
    cusum_threshold: float = _knob(7.0, "Sum of falls that raises the alarm, in standard errors (h).", gt=0)
    change_threshold: float = _knob(
        8.0, "Sum of unusual scores after which traffic counts as changed, in standard deviations of a query.", gt=0
    )
    window_sequences: int = _knob(16, "Sequences of one window of the alarms.", ge=4)
    fall_standard_errors: float = _knob(
        3.0, "Standard errors a fall over three windows must exceed; 0 is the paper's bare rule.", ge=0
    )
    collapse_margin: float = _knob(0.05, "A drafter that earns less than this per verify has collapsed.", gt=0, lt=1)
    collapse_verifies: int = _knob(64, "Verifies that the collapse alarm looks at.", ge=8)

    client_share: float = _knob(
        0.25, "Largest share of update data of one client; with fewer clients than fit, an equal share.", gt=0, le=1
    )
    client_free_queries: int = _knob(16, "Queries per half-life that a client may add whatever its share.", ge=0)
    query_positions: int = _knob(32, "Rejected positions of one query that are learnt from at most.", ge=1)
    quota_half_life_seconds: float = _knob(600.0, "Time after which a client's past use counts half.", gt=0)
    quota_clients: int = _knob(4096, "Clients remembered by the quota; of more, the smallest are forgotten.", ge=16)

    snapshots_in_memory: int = _knob(2, "Published drafters kept in memory for a rollback.", ge=1)
    snapshots_on_disk: int = _knob(8, "Published drafters kept on disk (ring).", ge=1)

    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis server through which several replicas share one learner: redis://, rediss:// or unix://. "
        "Unset: each server learns by itself. Texts of queries pass through it: let nobody else reach it.",
    )
    redis_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Secret of all replicas, with which they sign what they send. Unset: whoever can write to the "
        "server can bring weights. Prefer the environment or the file.",
    )
    redis_role: Literal["auto", "follower"] = Field(
        default="auto",
        description="auto: this replica learns for all when it is the one that leads. follower: it never does, because "
        "another one or `adaptree trainer` shall.",
    )
    redis_lost: Literal["learn", "stand_still"] = Field(
        default="learn",
        description="What a replica does while the server is lost. learn: it learns by itself, and drops that for what "
        "is announced later. stand_still: it keeps the drafter it has.",
    )
    redis_lease_seconds: float = _knob(
        3.0, "Time after which a leader that is not heard of any more is replaced, and a lost server is lost.", ge=0.5
    )
    redis_queries: int = _knob(
        128, "Queries that wait in the server, and in each replica, to be heard; the oldest make room.", ge=1
    )
    redis_query_mib: int = _knob(16, "Largest query that is sent, in MiB; a larger one is not learnt from.", ge=1)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.epsilon_end > self.epsilon_start:
            raise ValueError("epsilon_end must not exceed epsilon_start")
        if self.payback_queries < self.measured_queries:
            raise ValueError("payback_queries must not be below measured_queries: time would be charged more than once")
        if self.gate_sequences > self.held_back_sequences:
            raise ValueError("gate_sequences must not exceed held_back_sequences: no update could ever be published")
        if self.query_positions > self.buffer_positions:
            raise ValueError("query_positions must not exceed buffer_positions")
        if self.redis_url is not None and not self.enabled:
            raise ValueError("redis_url is set, but enabled is not: nobody would learn")
        return self


def usable_cores() -> int:
    """Physical cores that this process may run on: two threads of one core compute little more than one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable))
