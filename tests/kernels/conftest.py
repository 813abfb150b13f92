"""Where device kernels run: interpreted, on a machine without a device, or compiled on one (`pytest -m gpu`)."""

import pytest
import torch
import triton
from torch import Tensor

from tests.kernels.interpreter import complete


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _poisoned_memory: None) -> str:
    """Of the tensors a device kernel gets."""
    place = str(request.param)
    if place == "cuda":
        return place
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here; TRITON_INTERPRET=1 would interpret them")
    complete(monkeypatch)
    return place


@pytest.fixture
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, or numbers that are no index."""
    new_empty, empty_like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *args, **options: _poisoned(new_empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: _poisoned(empty_like(*args, **options)))


def _poisoned(values: Tensor) -> Tensor:
    return values.fill_(torch.nan if values.is_floating_point() else -(1 << 30))
