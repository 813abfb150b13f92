"""One function, eager or captured: the same results in padded shapes, and the twin without a device that tests it."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.graph_runner import (
    Capture,
    CudaGraphs,
    GraphRunner,
    _garbage_kept,
    batches_up_to,
    capture_for,
    rerun,
)
from tests.kernels.tensor_program import record

WITHOUT_A_DEVICE = pytest.mark.parametrize("capture", [rerun, record])


def check(capture: Capture, device: str) -> None:
    """A capture reads its inputs anew at every call, and another does not disturb it."""
    inputs = torch.arange(4.0, device=device)
    doubled, summed = torch.zeros(4, device=device), torch.zeros((), device=device)

    def double() -> None:
        doubled.copy_(inputs * 2)

    def add_up() -> None:
        summed.copy_((inputs[:2] + 1).sum())

    first, second = capture(double), capture(add_up)
    for offset in (0.0, 5.0):
        inputs.copy_(torch.arange(4.0) + offset)
        doubled.fill_(float("nan"))
        summed.fill_(float("nan"))
        first()
        second()
        assert doubled.tolist() == [2 * (n + offset) for n in range(4)]
        assert summed.item() == 3 + 2 * offset


@WITHOUT_A_DEVICE
def test_a_computation_repeats(capture: Capture) -> None:
    check(capture, "cpu")


@pytest.mark.gpu
def test_a_graph_repeats() -> None:
    check(CudaGraphs(torch.device("cuda")).capture, "cuda")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(was_enabled: bool) -> None:
    """What is given back then spoils the capture."""
    (gc.enable if was_enabled else gc.disable)()
    try:
        with _garbage_kept():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_without_a_device_nothing_is_captured() -> None:
    assert capture_for(torch.device("cpu")) is rerun


def sums(values: Tensor, width: int) -> tuple[Tensor, tuple[Tensor]]:
    """Of each row, and the rows themselves times their width."""
    return values.sum(1), (values * width,)


def runner(capture: Capture | None, rows: int = 4, width: int = 6) -> GraphRunner[tuple[Tensor, tuple[Tensor]]]:
    padding = torch.full((rows, width), 0.0)
    return GraphRunner(sums, capture, (((padding[:n], width), ()) for n in batches_up_to(rows)))


@pytest.mark.parametrize("capture", [None, rerun, record])
def test_calls_of_all_sizes_give_what_the_function_gives(capture: Capture | None) -> None:
    run = runner(capture)
    for rows, width in ((1, 6), (3, 2), (4, 6), (2, 1), (3, 2), (3, 2), (5, 6), (2, 7)):
        values = torch.rand(rows, width)
        total, (scaled,) = run((values, width))
        torch.testing.assert_close(total[:rows], values.sum(1))
        is_eager = capture is None or rows > 4 or width > 6
        assert total.shape[0] == (rows if is_eager or rows != 3 else 4)
        assert torch.equal(scaled[:rows, :width], values * (width if is_eager else 6))
        assert not scaled[rows:].any()


def test_sizes_are_not_remembered_for_ever() -> None:
    """Prompts of all lengths come along, which fit no shape."""
    run = GraphRunner(torch.neg, rerun, [((torch.zeros(4),), ())])
    for count in range(1, 600):
        assert torch.equal(run((torch.ones(count),))[:count], -torch.ones(count))
    assert run._fit.cache_info().currsize < 300
    assert torch.equal(run((torch.ones(3),))[:3], -torch.ones(3))


@WITHOUT_A_DEVICE
def test_results_of_all_shapes_stand_in_the_same_places_and_can_be_given_to_another(capture: Capture) -> None:
    first = runner(capture)
    second = GraphRunner(torch.neg, capture, (((), (total,)) for total, _ in first.results))
    total, _ = first((torch.ones(2, 6), 6))
    negative = second((), (total,))
    assert negative.tolist() == [-6.0, -6.0]
    first((torch.zeros(4, 6), 6))
    assert total.tolist() == [0.0, 0.0]
    assert negative.tolist() == [-6.0, -6.0]
    assert torch.equal(second((), (torch.ones(2),)), torch.tensor([-1.0, -1.0]))  # stands elsewhere: eager
    assert negative.tolist() == [-6.0, -6.0]


def frozen(capture: Capture) -> tuple[float, float]:
    """What a call says, and what it should say, where the function keeps a number in Python."""
    scale = [1.0]
    run = GraphRunner(lambda values: values * scale[0], capture, [((torch.zeros(2),), ())])
    scale[0] = 3.0
    return run((torch.ones(2),))[0].item(), 3.0


def test_the_twin_catches_a_value_that_was_frozen_while_capturing() -> None:
    found, expected = frozen(record)
    assert found != expected
    assert frozen(rerun)[0] == expected  # which calling again cannot


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: x + 1 if x.any() else x,
    "int": lambda x: x[: int(x.sum())],
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "upload": lambda x: x + torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("name", READS)
def test_the_twin_refuses_what_a_device_cannot_capture(name: str) -> None:
    values = torch.ones(2)

    def compute() -> None:
        READS[name](values)

    compute()
    with pytest.raises(AssertionError):
        record(compute)
