"""What is built for a configuration, and the metrics page of a server that learns."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from adaptation.config import AdaptationConfig
from adaptation.records import AdaptationStatus
from drafters import registry
from drafters.kinds import Kind, Parts
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftingSizes, Read
from drafters.registry import memory_of
from kernels.cpu.library import use_threads
from service.api.tenants import Tenants
from service.assembly import assemble
from service.config import ServiceConfig
from service.engine.requests import SequenceOutput, Submission
from service.engine.thread import EngineThread
from service.learning.adaptive import Adaptive
from service.observability.live import Live
from service.serve import api_settings, keep_past_answers, load_model_service, metrics_of, rendered
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, settings_for
from tests.service.engine.harness import generate, greedy, request
from tests.service.scripted import STATUS, ScriptedAdaptation, ScriptedEngine, running, runtime_of, say
from tests.service.test_metrics import made, series

NO_TENANTS = Tenants((), Path("nowhere"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    yield
    use_threads(1)


class _Renamed(MemoryDrafter):
    name = "of another name"


@pytest.fixture
def another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose drafter calls itself otherwise."""
    monkeypatch.setitem(registry._KINDS, "other", Kind(lambda parts: _Renamed(parts.sizes)))


def settings(folder: Path, **values: object) -> ServiceConfig:
    return settings_for(folder).model_copy(update={"budget_policy": "fixed", **values})


@pytest.mark.parametrize("enabled", [True, False])
def test_learning_is_built_where_it_is_wanted(tmp_path: Path, enabled: bool) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    learning = AdaptationConfig(enabled=enabled)
    served = load_model_service(settings(folder, drafter_path=drafter, adaptation=learning), made(), Live())
    assert isinstance(served.adaptation, Adaptive) is enabled
    assert served.card.drafter == "memory+specblock"


def test_servers_of_one_state_dir_learn_in_folders_of_their_own(tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    config = settings(
        folder,
        drafter_path=save_drafter(tmp_path / "drafter", assembled(folder)),
        state_dir=tmp_path / "state",
        adaptation=AdaptationConfig(enabled=True),
    )
    for _ in range(2):
        load_model_service(config, made(), Live())
    first, second = sorted(path.name for path in (tmp_path / "state" / "adaptation").iterdir())
    assert second == f"{first}-2"


def test_a_drafter_without_weights_is_served_without_learning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_two_layers(tmp_path)
    learning = AdaptationConfig(enabled=True)
    served = load_model_service(settings(folder, adaptation=learning, drafter="memory"), made(), Live())
    assert served.adaptation is None
    assert "the drafter has no weights to train" in caplog.text


@pytest.mark.parametrize(
    ("drafter", "sources"),
    [
        ("specblock", {"specblock"}),
        ("memory+specblock", {"memory", "specblock"}),
        ("other", {"of another name"}),
    ],
)
@pytest.mark.usefixtures("another_kind")
def test_a_drafter_has_its_tokens_counted(tmp_path: Path, drafter: str, sources: set[str]) -> None:
    folder = save_two_layers(tmp_path / "model")
    weights = save_drafter(tmp_path / "drafter", assembled(folder)) if "specblock" in drafter else None
    config = settings(folder, drafter=drafter, drafter_path=weights)
    metrics, ended = metrics_of(config), threading.Event()

    def deliver(outputs: list[SequenceOutput]) -> None:  # nothing where the engine broke
        if not outputs or outputs[-1].finish_reason:
            ended.set()

    engine = load_model_service(config, metrics, Live()).engine
    engine.start(deliver)
    engine.submit(Submission([request("a", [5, 6, 5, 6, 5, 6, 5], greedy(12))]))
    assert ended.wait(20)
    engine.drain()
    engine.stop()
    assert engine.failure is None
    found, counted = series(metrics), "adaptree_accepted_tokens_by_source_total{"
    assert {name.removeprefix(counted).rstrip("}") for name in found if name.startswith(counted)} == sources


class _Tapping(MemoryDrafter):
    """Is notified of layers, and keeps how much."""

    name, reads_prompts = "tapping", True

    def __init__(self, sizes: DraftingSizes, *layers: int) -> None:
        super().__init__(sizes)
        self._layers, self.widths = layers, set[int]()

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._layers

    def read(self, read: Read) -> None:
        self.widths.add(read.features.shape[-1])

    def commit(self, committed: Committed) -> None:
        assert committed.features is not None
        self.widths.add(committed.features.shape[-1])
        super().commit(committed)


@pytest.mark.parametrize("drafter", ["tapping", "memory+tapping"])
def test_a_kind_says_what_it_taps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    built: list[_Tapping] = []

    def build(parts: Parts) -> _Tapping:
        built.append(_Tapping(parts.sizes, 1))
        return built[-1]

    monkeypatch.setitem(registry._KINDS, "tapping", Kind(build, tap_layers=lambda num_layers: (num_layers - 1,)))
    assembly = assemble(settings(save_two_layers(tmp_path), drafter=drafter))
    assert registry.taps_of(drafter, 2, (0, 1)) == (1,)
    assert generate(assembly.engine(), request("a", [5, 6, 5, 6, 5], greedy(12)))
    assert built[-1].widths == {32}


async def test_the_metrics_page_asks_learning_first() -> None:
    async with running(ScriptedEngine(say("x")), adaptation=ScriptedAdaptation()) as runtime:
        page, _ = await rendered(made(), Live(), runtime, NO_TENANTS)
    assert b"adaptree_adaptation_queries_total 40.0" in page


async def test_the_metrics_page_waits_for_no_one() -> None:
    opened = threading.Event()

    class Busy(ScriptedAdaptation):
        def status(self) -> AdaptationStatus:
            assert opened.wait(10)
            return STATUS

    metrics = made()
    page, _ = await rendered(metrics, Live(), runtime_of(ScriptedEngine(say("x"))), NO_TENANTS)
    assert b"adaptree_adaptation_queries_total 0.0" in page
    async with running(ScriptedEngine(say("x")), adaptation=Busy()) as runtime:
        page, _ = await asyncio.wait_for(rendered(metrics, Live(), runtime, NO_TENANTS), 5)
        assert b"adaptree_adaptation_queries_total 0.0" in page
        opened.set()
    assert series(metrics)["adaptree_drafter_version"] == 0


def test_past_answers_are_kept_and_shared_where_it_is_configured(tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    config = settings(folder, drafter="memory+random", memory_file=tmp_path / "past")
    keys = [api_settings(config).naming_key for _ in range(2)]
    assert keys[0] == keys[1]
    assert api_settings(settings(folder)).naming_key not in keys
    assembly = assemble(config)
    memory = memory_of(assembly.drafter())
    assert memory is not None
    learning = AdaptationConfig(redis_url=SecretStr("redis://127.0.0.1:9"), redis_secret=SecretStr("x" * 16))
    both = config.model_copy(update={"adaptation": learning})
    for one, expected in ((config, 1), (both, 2), (settings(folder, drafter="memory"), 0)):
        ends = keep_past_answers(replace(assembly, config=one), memory, EngineThread(assembly.engine(memory)))
        assert len(ends) == expected
        for end in ends:
            end()
    assert keep_past_answers(assembly, assembly.drafter("random"), EngineThread(assembly.engine(memory))) == []
