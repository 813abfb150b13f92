"""Where kernels run: those of a device interpreted, on a machine without one, or compiled on one (`pytest -m gpu`);
those of a CPU in every build that the processor can run."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
import triton
from torch import Tensor

from kernels import ops
from kernels.cpu import library
from kernels.ops import REFERENCE, Ops, implementation
from tests.kernels.interpreter import complete

ABLE = torch.cpu.get_capabilities()
BUILDS = [
    name
    for name, needs in library.VARIANTS.items()
    if find_spec(f"kernels.cpu.{name}") is not None and all(ABLE.get(need, False) for need in needs)
]
CPU = torch.device("cpu")
OTHER = pytest.mark.slow(
    "other builds of the same source, and the device's kernels interpreted", covers="kernels tests/kernels"
)
BY_BUILD = [name if name == library.variant() else pytest.param(name, marks=OTHER) for name in BUILDS]
INTERPRETED = pytest.param("interpreted", marks=OTHER)
ON_A_DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=BY_BUILD)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The ops of a CPU in one build."""
    yield from of_build(str(request.param), monkeypatch)


@pytest.fixture(params=["reference", *BY_BUILD])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The ops of a CPU, compiled or not."""
    if request.param == "reference":
        yield REFERENCE
    else:
        yield from of_build(str(request.param), monkeypatch)


def of_build(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ops]:
    """The ops of a CPU in that build."""
    monkeypatch.setattr(library, "variant", lambda: name)
    for found in (library.function, ops._table):
        found.cache_clear()
    yield ops.on(CPU)
    for found in (library.function, ops._table):
        found.cache_clear()


@pytest.fixture(params=[INTERPRETED, ON_A_DEVICE])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Device of the tensors that a device kernel gets: the CPU where kernels are interpreted."""
    return prepared(DEVICES[request.param], monkeypatch)


DEVICES = {"interpreted": "cpu", "cuda": "cuda"}
PLACES = [*BY_BUILD, INTERPRETED, ON_A_DEVICE]


@pytest.fixture(params=PLACES)
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ops, str]]:
    """The ops of a CPU in each build, and those of a device, with the device of their tensors."""
    yield from at_place(request, monkeypatch)


@pytest.fixture(params=["reference", *PLACES])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ops, str]]:
    """As `everywhere`, and the reference."""
    yield from at_place(request, monkeypatch)


def at_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Ops, str]]:
    """The ops of one place, with the device of their tensors."""
    if request.param == "reference":
        yield REFERENCE, "cpu"
    elif request.param in BUILDS:
        for found in of_build(str(request.param), monkeypatch):
            yield found, "cpu"
    else:
        place = prepared(DEVICES[request.param], monkeypatch)
        yield implementation("triton"), place


def prepared(device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, where device kernels can now run on it: interpreted, or compiled."""
    poison(monkeypatch)
    if device == "cpu":
        if not triton.knobs.runtime.interpret:
            pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 would interpret them")
        complete(monkeypatch)
    return device


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or numbers that are no index."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: _poisoned(new_empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: _poisoned(empty_like(*args, **options)))


def _poisoned(values: Tensor) -> Tensor:
    return values.fill_(torch.nan if values.is_floating_point() else -(1 << 30))
