"""The stream that serving computes on: of higher priority than the one that learning has beside it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels.graph_runner import HIGH_PRIORITY


@contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """Compute on a stream of high priority, behind what was asked for until now and before what is asked for later;
    nothing changes on a CPU."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
    before = torch.cuda.current_stream(device)
    stream.wait_stream(before)
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    finally:
        before.wait_stream(stream)
