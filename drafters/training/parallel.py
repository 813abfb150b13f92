"""The processes of a training run: one, or several under `torchrun` with the same weights and different batches.
Gradients are averaged explicitly, because a step calls the network several times, which DDP does not support well."""

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
from torch import Tensor, distributed

_TIMEOUT = timedelta(days=7)
"""Long, because the other processes wait while the first one prepares data and evaluates."""


class Ranks:
    """Collective operations of this process with the others of its run; no-ops without a device, for a single
    process."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.rank, self.size = 0, 1
        if device is not None:
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
            self.rank, self.size = distributed.get_rank(), distributed.get_world_size()

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over all processes, in place. # tensors [...] each"""
        if self._device is None:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])  # one message: each costs a round trip
        distributed.all_reduce(flat)
        flat /= self.size
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def spread(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's values to all processes, in place. # tensors [...] each"""
        for tensor in tensors if self._device is not None else ():
            distributed.broadcast(tensor, src=0)

    def first(self, value: float) -> float:
        """Return the first process's value."""
        if self._device is None:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self._device)
        distributed.broadcast(shared, src=0)
        return float(shared)

    def wait(self) -> None:
        """Wait until all processes have called this."""
        if self._device is not None:
            distributed.barrier()

    def leave(self) -> None:
        """Leave the process group."""
        if self._device is not None:
            distributed.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """Return this process's device, which under torchrun is a GPU of its own."""
    if device.type == "cuda" and distributed.is_torchelastic_launched():
        return torch.device("cuda", distributed.get_node_local_rank())
    return device


def join(device: torch.device) -> Ranks:
    """Join the processes of this run, if it was started by torchrun."""
    return Ranks(device if distributed.is_torchelastic_launched() else None)
