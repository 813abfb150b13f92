"""Repeating a computation on buffers that stay: what is read at each replay, and what comes out."""

import pytest
import torch

from service.engine.graphs import CudaGraphs, Graphs, Rerun, graphs_for


def check(graphs: Graphs, device: str) -> None:
    """A capture reads its inputs anew at every replay, and another does not disturb it."""
    inputs = torch.arange(4.0, device=device)
    doubled, summed = torch.zeros(4, device=device), torch.zeros((), device=device)

    def double() -> None:
        doubled.copy_(inputs * 2)

    def add_up() -> None:
        summed.copy_((inputs[:2] + 1).sum())

    first, second = graphs.capture(double), graphs.capture(add_up)
    for offset in (0.0, 5.0):
        inputs.copy_(torch.arange(4.0) + offset)
        doubled.fill_(float("nan"))
        summed.fill_(float("nan"))
        first()
        second()
        assert doubled.tolist() == [2 * (n + offset) for n in range(4)]
        assert summed.item() == 3 + 2 * offset


def test_asking_again_repeats() -> None:
    check(Rerun(), "cpu")


@pytest.mark.gpu
def test_a_graph_repeats() -> None:
    check(CudaGraphs(torch.device("cuda")), "cuda")


def test_without_a_device_nothing_is_captured() -> None:
    assert isinstance(graphs_for(torch.device("cpu")), Rerun)
