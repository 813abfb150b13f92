"""The command of the process that learns for others: what it takes over, and when it does not begin."""

from pathlib import Path

import pytest

from service.config_sources import load_config
from service.errors import StartupError
from service.learning.adaptive import train, with_url
from tests.service.bench.parts import save_two_layers, settings_for

URL = "redis://localhost:1/0"


def test_its_role_is_to_learn_whatever_that_of_the_replicas_is() -> None:
    replicas = load_config({"adaptation.enabled": "true", "adaptation.policy": "never", "adaptation.alpha": "0.3"})
    learning = with_url(replicas.config, URL).adaptation
    assert learning.redis_url is not None
    assert (learning.redis_url.get_secret_value(), learning.policy, learning.enabled) == (URL, "bandit", True)
    assert learning.alpha == 0.3


def test_without_a_url_there_is_no_one_to_learn_for() -> None:
    with pytest.raises(StartupError, match="--redis URL"):
        with_url(load_config({}).config, None)


def test_the_url_may_stand_in_the_configuration() -> None:
    config = load_config({"adaptation.enabled": "true", "adaptation.redis_url": URL}).config
    url = with_url(config, None).adaptation.redis_url
    assert url is not None
    assert url.get_secret_value() == URL


def test_without_weights_there_is_nothing_to_train(tmp_path: Path) -> None:
    settings = settings_for(save_two_layers(tmp_path)).model_copy(update={"drafter": "memory"})
    with pytest.raises(StartupError, match="drafter_path"):
        train(with_url(settings, URL))
