"""Computations that are repeated in one shape on buffers that stay where they are: captured once, replayed every step.

On a CUDA device a capture is a graph, and a replay one launch. Elsewhere it is the computation itself, asked for
again: the same buffers, the same padding, the same bits, so that everything around graphs is tested without a device.
Knows neither targets nor drafters.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from service.engine.streams import HIGH_PRIORITY


class Graphs(Protocol):
    """Makes a computation repeatable."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What repeats `compute`, which reads and writes only tensors that outlive it and allocates whatever it likes
        in between. It is run at least once."""
        ...


class Rerun:
    """Repeats a computation by asking for it again."""

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute


class CudaGraphs:
    """Repeats a computation as a CUDA graph; all graphs share one pool of memory, for no two of them run at once.

    One stream for all of them: memory and libraries' workspaces belong to the stream that they were allocated on, so
    that another one for each capture would share nothing. Kernels keep its priority.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)

    def capture(self, compute: Callable[[], None]) -> Callable[[], None]:
        self._warm_up(compute)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            compute()
        return graph.replay

    def _warm_up(self, compute: Callable[[], None]) -> None:
        """Libraries choose their algorithms and allocate their workspaces in the first run on a stream."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            compute()
        main.wait_stream(self._stream)


def graphs_for(device: torch.device) -> Graphs:
    """What repeats computations on this device."""
    return CudaGraphs(device) if device.type == "cuda" else Rerun()
