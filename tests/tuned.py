"""Learning on tiny models: settings of operators, and numbers that are fixed in every deployment, by one name each."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields

import pytest

from adaptation.config import AdaptationConfig, Tuning
from adaptation.worker import Worker

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


def tuned(knobs: Mapping[str, object]) -> tuple[AdaptationConfig, Tuning]:
    settings = {name: value for name, value in knobs.items() if name not in _FIXED}
    return AdaptationConfig.model_validate(settings), Tuning(**fixed(knobs))  # type: ignore[arg-type]


def fixed(knobs: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in knobs.items() if name in _FIXED}


def tune(monkeypatch: pytest.MonkeyPatch, knobs: Mapping[str, object]) -> None:
    """What learns from here on has these fixed numbers, whoever builds it."""
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
    """`adaptree` with these fixed numbers."""
    _DEFAULTS.update(numbers)
    from service.cli import main

    main()
