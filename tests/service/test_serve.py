"""What is built for a configuration, and the metrics page of a server that learns."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adaptation.config import AdaptationConfig
from adaptation.records import AdaptationStatus
from service.api.tenants import Tenants
from service.config import ServiceConfig
from service.learning.adaptive import Adaptive
from service.observability.live import Live
from service.serve import load_served, rendered
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, settings_for
from tests.service.scripted import STATUS, ScriptedAdaptation, ScriptedEngine, running, runtime_of, say
from tests.service.test_metrics import made, series

NOBODY = Tenants((), Path("nowhere"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def settings(folder: Path, **values: object) -> ServiceConfig:
    return settings_for(folder).model_copy(update={"budget_policy": "fixed", **values})


@pytest.mark.parametrize("enabled", [True, False])
def test_learning_is_built_where_it_is_wanted(tmp_path: Path, enabled: bool) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    learning = AdaptationConfig(enabled=enabled)
    served = load_served(settings(folder, drafter_path=drafter, adaptation=learning), made(), Live())
    assert isinstance(served.adaptation, Adaptive) is enabled
    assert served.card.drafter == "lookup+specblock"


def test_a_drafter_without_weights_is_served_without_learning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_two_layers(tmp_path)
    learning = AdaptationConfig(enabled=True)
    served = load_served(settings(folder, adaptation=learning, drafter="lookup"), made(), Live())
    assert served.adaptation is None
    assert "the drafter lookup has no weights to train" in caplog.text


def test_weights_that_are_made_up_are_served_without_learning(tmp_path: Path) -> None:
    learning = AdaptationConfig(enabled=True)
    made_up = {"model": "dummy(tiny)", "drafter_path": None, "drafter": "specblock", "device": "cpu"}
    served = load_served(settings(tmp_path, adaptation=learning, **made_up), made(), Live())
    assert (served.adaptation, served.card.drafter) == (None, "specblock")


@pytest.mark.anyio
async def test_the_metrics_page_asks_learning_first() -> None:
    async with running(ScriptedEngine(say("x")), adaptation=ScriptedAdaptation()) as runtime:
        page, _ = await rendered(made(), runtime, NOBODY)
    assert b"adaptree_adaptation_queries_total 40.0" in page


@pytest.mark.anyio
async def test_the_metrics_page_waits_for_nobody() -> None:
    opened = threading.Event()

    class Busy(ScriptedAdaptation):
        def status(self) -> AdaptationStatus:
            assert opened.wait(10)
            return STATUS

    metrics = made()
    page, _ = await rendered(metrics, runtime_of(ScriptedEngine(say("x"))), NOBODY)
    assert b"adaptree_adaptation_queries_total 0.0" in page
    async with running(ScriptedEngine(say("x")), adaptation=Busy()) as runtime:
        page, _ = await asyncio.wait_for(rendered(metrics, runtime, NOBODY), 5)
        assert b"adaptree_adaptation_queries_total 0.0" in page
        opened.set()
    assert series(metrics)["adaptree_drafter_version"] == 0
