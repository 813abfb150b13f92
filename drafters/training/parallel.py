"""One process, or several that train the same weights on different batches (`torchrun`).

Gradients are averaged by hand: a step calls the network several times with different rows, which wrappers that count
calls do not expect. Knows tensors only.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor, distributed

_PATIENCE = timedelta(days=7)
"""The first process prepares data and evaluates while the others wait."""


class Ranks(Protocol):
    """The processes of one run, seen from one of them."""

    rank: int
    size: int

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in place."""
        ...

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the first one's values, in place."""
        ...

    def first(self, value: float) -> float:
        """The first process's value."""
        ...

    def wait(self) -> None:
        """Until all processes are here."""
        ...

    def leave(self) -> None:
        """The run is over."""
        ...


class OneProcess:
    """Nobody to agree with."""

    rank = 0
    size = 1

    def average(self, tensors: Sequence[Tensor]) -> None:
        return

    def spread(self, tensors: Iterable[Tensor]) -> None:
        return

    def first(self, value: float) -> float:
        return value

    def wait(self) -> None:
        return

    def leave(self) -> None:
        return


class ProcessGroup:
    """The processes torchrun started, joined by torch.distributed."""

    def __init__(self, device: torch.device) -> None:
        backend = "nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=_PATIENCE)
        self._device = device
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def average(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])  # one message: each costs a round trip
        distributed.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def spread(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            distributed.broadcast(tensor, src=0)

    def first(self, value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(shared, src=0)
        return float(shared)

    def wait(self) -> None:
        distributed.barrier()

    def leave(self) -> None:
        distributed.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """This process's own device: one GPU each under torchrun."""
    if device.type == "cuda" and distributed.is_torchelastic_launched():
        return torch.device("cuda", distributed.get_node_local_rank())
    return device


def join(device: torch.device) -> Ranks:
    """The processes of this run."""
    return ProcessGroup(device) if distributed.is_torchelastic_launched() else OneProcess()
