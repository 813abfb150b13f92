import pytest
from pydantic import ValidationError

from adaptation.config import AdaptationConfig


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


def test_what_opens_the_shared_server_is_not_shown() -> None:
    config = AdaptationConfig.model_validate(
        {"enabled": True, "redis_url": "redis://:password@localhost", "redis_secret": "a secret of all replicas"}
    )
    shown = f"{config!r} {config.model_dump_json()}"
    assert "password" not in shown
    assert "a secret" not in shown
