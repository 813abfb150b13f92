"""Configuration of learning while serving: the operator's settings, and constants.

Symbols follow SpecBlock (arXiv 2605.07243), section 3.4 and appendix A.3. `build_learner` passes each part only the
values that it uses.
"""

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import psutil
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, model_validator


def _knob(default: Any, description: str, **limits: float) -> Any:
    return Field(default=default, description=description, **limits)  # type: ignore[call-overload]


def _numbers(value: object) -> object:
    """Split the text of a flag or an environment variable at its commas, such as 0.3,0.1."""
    return value.split(",") if isinstance(value, str) else value


class AdaptationConfig(BaseModel):
    """The operator's settings of learning. Unknown keys are an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    enabled: bool | Literal["auto"] = Field(
        default="auto",
        description="Learn from the traffic that is served. It changes the speed of an answer, never its text. auto: "
        "if a block of the drafter takes at most 0.15 of a plain step or no drafter serves yet, past answers may be "
        "kept and there are no api_keys; and only while the machine has idle time.",
    )
    policy: Literal["bandit", "never"] = Field(
        default="bandit",
        description="Policy that decides about updates. bandit: expected gain (algorithm 1). never: no updates; "
        "with several replicas, this one serves what the others learn.",
    )
    alpha: float = _knob(
        0.10,
        "Smallest weight of a new measurement in the value of an arm (alpha). The first measurements are averaged.",
        gt=0,
        le=1,
    )
    epsilon: Annotated[tuple[float, float], BeforeValidator(_numbers)] = Field(
        default=(0.30, 0.10),
        description="Share of queries that explore (epsilon): at first, and from the 8th judged update on. An "
        "exploring query "
        "goes to the arm that was tried least, if the ledger covers it.",
    )
    s_min: float = _knob(5.0, "Updates triggered by less signal do not change the value of their arm (s_min).", ge=0)
    anchor_weight: float = _knob(0.01, "Weight of the divergence from the anchor drafter in the loss (lambda).", ge=0)
    learning_rate: float = _knob(4e-4, "Largest learning rate of full updates.", gt=0)
    train_device: str = Field(
        default="same",
        description="Device that computes updates: same (the target's), cpu, cuda or cuda:N.",
        pattern=r"^(same|cpu|cuda(:\d+)?)$",
    )
    train_in: Literal["auto", "process", "thread"] = Field(
        default="auto",
        description="Where updates run. process: a process of its own, which hardly slows serving (CPU, Linux). "
        "thread: a "
        "thread of the server, which shares its interpreter. auto: a process where one can be started and the "
        "drafter is not tiny.",
    )
    idle_share: float = _knob(
        1.0,
        "Share of the engine's idle time that learning may use for full updates on the replay buffer. A request "
        "stops them: a training process at once, a thread after an optimizer step. 0: learn from new texts only.",
        ge=0,
        le=1,
    )
    replay_file: Path | None = Field(
        default=None,
        description="File that keeps the texts that learning trains on in idle time over restarts, readable by the "
        "server's user only; its key is in FILE.key. Unset: they are in memory only.",
    )
    bootstrap_prompts: Path | None = Field(
        default=None,
        description="JSON Lines file of prompts that the server answers while it is idle, until it has made a "
        "drafter for a "
        "model that has none: the drafter is ready before the first user. Unset: only users' queries make it.",
    )
    redis_url: SecretStr | None = Field(
        default=None,
        description="Redis server through which replicas share one learner and, with redis_secret, past answers "
        "(these also "
        "without learning): redis://, rediss:// or unix://. Unset: each server learns by itself. Texts of queries "
        "and answers pass through it, so restrict access to it.",
    )
    redis_secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="Secret of all replicas, with which they sign what they send. Unset: anyone who can write "
        "to the Redis "
        "server can inject weights. Prefer the environment or a file.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        first, last = self.epsilon
        if not 0 <= last <= first <= 1:
            raise ValueError("epsilon must be two shares, the second not above the first")
        if self.learns_together and not self.enabled:
            raise ValueError(
                "redis_url is set, but neither enabled, to learn together, nor redis_secret, to share past answers"
            )
        return self

    @property
    def learns_together(self) -> bool:
        """Whether there is a shared store that serves nothing but learning."""
        return self.redis_url is not None and self.redis_secret is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Constants of every deployment; tests with tiny models and short streams use smaller numbers."""

    seed: int = 0  # seed of buffers, validation set, bandit and training
    window_tokens: int = 256  # tokens per text in a full update, at most
    target_top: int = 64  # tokens of the target's distribution kept per rejected position
    queued_queries: int = 256  # finished queries that wait to be observed; the oldest are dropped
    niceness: int = 10  # niceness of the learning thread (Linux); a higher one makes serving wait for its lock
    head_queries: int = 4  # buffer size of the head update (draft head and rank head)
    full_queries: int = 8  # buffer size of the full update
    warm_up_queries: int = 10  # queries before the bandit's first decision
    client_share: float = 0.25  # largest share of the training data per client; an equal share with few clients
    client_free_queries: int = 16  # queries per half-life that each client may add regardless of its share
    head_steps: int = 1  # optimizer steps of a head update, all on the same buffer
    full_steps: int = 8  # optimizer steps of a full update, in as many passes as needed
    step_texts: int = 3  # texts per optimizer step of a full update
    warm_up_steps: int = 8  # steps of learning-rate warm-up after a reset; at most one update
    update_norm: float = 0.02  # maximum change of the weights by an update, relative to their norm
    replay_share: float = 0.125  # of the memory that is free at the start, the most that the replay buffer takes
    kept_refusals: int = 8  # refusals in a row before the training copy starts over: small updates add up
    recorded_share: float = 1 / 16  # share of queries recorded once texts suffice: recording costs 2 % of a fast step
    validation_share: float = 0.25  # share of queries held for validation, never trained on
    validation_texts: int = 96  # size of the validation set, the latest texts: shows gains of 2 % of 48-token answers
    gate_texts: int = 8  # validation texts that a publish needs at least
    gate_alpha: float = 0.10  # share of training copies without a gain that the gate may publish
    drift_texts: int = 8  # first validation texts, on which the distance to the anchor is measured
    alarm_texts: int = 8  # texts per window of the alarms
    snapshots: int = 8  # published drafters kept on disk

    @property
    def unscored_texts(self) -> int:
        """Texts that wait to be scored for the alarms, at most: all windows in which weights are new, and one more."""
        return 5 * self.alarm_texts


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Number of physical cores that this process may use, within its affinity and the CPU quota of its control group.
    Logical cores are not counted: two threads on one core compute little more than one."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1
    quota = min(_quotas(cgroups, mine), default=float(usable))
    return max(1, min(usable, psutil.cpu_count(logical=False) or usable, math.ceil(quota)))


def free_memory(container: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory that are free, in a container within its limit (control groups of version 2), of which cached
    files, as those of loaded weights, take nothing."""
    free, limit = psutil.virtual_memory().available, container / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdecimal():
        cached = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((container / "memory.current").read_text()) - int(cached)
        free = min(free, int(limit.read_text()) - used)
    return max(0, free)


def _quotas(cgroups: Path, mine: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control group: of version 2 (`cpu.max`) or 1
    (`cpu.cfs_quota_us`)."""
    for line in mine.read_text().splitlines() if mine.is_file() else ():
        _, controllers, group = line.split(":", 2)
        version_2 = not controllers
        folder = cgroups / ("" if version_2 else controllers) / group.lstrip("/")
        files = ["cpu.max"] if version_2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        words = [word for name in files if (folder / name).is_file() for word in (folder / name).read_text().split()]
        if len(words) == 2 and words[0].isdecimal():  # no quota is `max` or -1
            yield int(words[0]) / int(words[1])
