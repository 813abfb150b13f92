"""Learning on tiny models: settings of operators, and numbers that are fixed in every deployment, by one name each."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import get_args

import pytest

from adaptation.config import AdaptationConfig, Tuning
from adaptation.policy import Bandit
from adaptation.worker import Worker
from benchmarks.policies import FixedName, fixed_policy

QUICK: dict[str, object] = {
    "policy": "head_only",
    "learning_rate": 0.003,
    "update_norm": 1.0,
    "gate_texts": 4,
    "gate_alpha": 0.9,  # 0.1 at each of nine judgements: so few texts can hardly show more
    "validation_texts": 8,
    "validation_share": 0.5,
    "alarm_texts": 4,
    "drift_texts": 2,
    "client_free_queries": 1000,
    "recorded_share": 1.0,
    "idle_share": 0.0,
}
"""Quick to decide on tiny models."""
_FIXED = {field.name for field in fields(Tuning)}
_DEFAULTS: dict[str, object] = Tuning.__init__.__kwdefaults__ or {}


def tuned(knobs: Mapping[str, object]) -> tuple[AdaptationConfig, Tuning, Bandit | None]:
    """Settings, numbers, and the policy if it is one of the benchmarks'."""
    numbers = fixed(knobs)
    name = numbers.pop("policy", None)
    settings = {key: value for key, value in knobs.items() if key not in _FIXED and (key, value) != ("policy", name)}
    settings = {"enabled": True, **settings}
    tuning = Tuning(**numbers)  # type: ignore[arg-type]
    policy = None if name is None else fixed_policy(name, tuning)  # type: ignore[arg-type]
    return AdaptationConfig.model_validate(settings), tuning, policy


def fixed(knobs: Mapping[str, object]) -> dict[str, object]:
    """What no setting of an operator says: numbers, and a policy of the benchmarks."""
    numbers = {name: value for name, value in knobs.items() if name in _FIXED}
    return numbers | {name: value for name, value in knobs.items() if name == "policy" and value in get_args(FixedName)}


def tune(monkeypatch: pytest.MonkeyPatch, knobs: Mapping[str, object]) -> None:
    """What learns from here on has these fixed numbers."""
    for name, value in fixed(knobs).items():
        monkeypatch.setitem(_DEFAULTS, name, value)


def settled(worker: Worker, seconds: float = 60.0) -> bool:
    """Wait until every query is observed and no update is due; False: not in time."""
    deadline = time.monotonic() + seconds
    with suppress(TimeoutError):
        while time.monotonic() < deadline:
            if worker.ask(lambda: not (worker.inbox.queries or worker.works)).result(seconds):
                return True
            time.sleep(0.01)
    return False


def run(numbers: Mapping[str, object]) -> None:
    """`adaptree` with these fixed numbers, and this policy if there is one."""
    policy = dict(numbers).pop("policy", None)
    _DEFAULTS.update({name: value for name, value in numbers.items() if name in _FIXED})
    if policy is not None:
        from adaptation import learner

        def policy_of(config: AdaptationConfig, tuning: Tuning) -> Bandit:
            return fixed_policy(policy, tuning)  # type: ignore[arg-type]

        setattr(learner, "policy_of", policy_of)  # noqa: B010
    from service.cli import main

    main()
