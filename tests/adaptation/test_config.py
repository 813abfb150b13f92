import pytest
from pydantic import ValidationError

from adaptation.config import AdaptationConfig


def test_the_defaults_are_those_of_the_paper() -> None:
    config = AdaptationConfig()
    assert (config.alpha, config.anchor_weight, config.s_min) == (0.10, 0.01, 5.0)
    assert config.epsilon == (0.30, 0.10)
    assert config.policy == "bandit"
    assert not config.enabled


def test_every_knob_says_what_it_is() -> None:
    assert [name for name, field in AdaptationConfig.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("symbol", ["(alpha)", "(lambda)", "(epsilon)", "(s_min)"])
def test_the_symbols_of_the_paper_are_named(symbol: str) -> None:
    assert any(symbol in (field.description or "") for field in AdaptationConfig.model_fields.values())


@pytest.mark.parametrize(
    "wrong",
    [
        {"alhpa": 0.1},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"policy": "sometimes"},
        {"epsilon": 0.3},
        {"epsilon": (0.1, 0.3)},
        {"epsilon": (1.5, 0.1)},
        {"idle_share": 1.5},
        {"idle_share": -0.1},
        {"enabled": "perhaps"},
        {"train_device": "cuda:x"},
        {"redis_url": "redis://localhost"},  # and nobody would learn, nor share
        {"redis_secret": "too short"},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AdaptationConfig.model_validate(wrong)


def test_it_cannot_be_changed() -> None:
    config = AdaptationConfig()
    with pytest.raises(ValidationError):
        config.alpha = 0.5


def test_what_opens_the_shared_server_is_not_shown() -> None:
    config = AdaptationConfig.model_validate(
        {"enabled": True, "redis_url": "redis://:password@localhost", "redis_secret": "a secret of all replicas"}
    )
    shown = f"{config!r} {config.model_dump_json()}"
    assert "password" not in shown
    assert "a secret" not in shown
