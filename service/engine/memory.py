"""Device memory, shared out before anything is served: what everything else will need is set aside first, and keys and
values get a share of the rest. Nothing grows while serving.

Knows bytes and the settings that cost them, not what the bytes are for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from service.errors import StartupError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that something will take once the key/value pool stands."""

    what: str
    num_bytes: int
    lower: str  # what an operator can do about it


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is free, and what of it is spoken for."""

    free_bytes: int
    needs: tuple[Need, ...]

    @property
    def left_bytes(self) -> int:
        """What keys and values can have. Raises StartupError when there is nothing."""
        left = self.free_bytes - sum(need.num_bytes for need in self.needs)
        if left <= 0:
            largest = max(self.needs, key=lambda need: need.num_bytes)
            raise StartupError(
                f"{_gib(self.free_bytes)} of device memory are free beside the weights, but {self.described()} are "
                f"needed: {largest.lower}"
            )
        return left

    def check(self, pool_bytes: int) -> None:
        """Raise StartupError when keys and values are to have more than is left."""
        if pool_bytes > self.left_bytes:
            raise StartupError(
                f"{_gib(pool_bytes)} for keys and values are more than the {_gib(self.left_bytes)} of device memory "
                f"that are left beside {self.described()}: lower kv_cache_gib"
            )

    def described(self) -> str:
        """Every need, largest first."""
        by_size = sorted(self.needs, key=lambda need: -need.num_bytes)
        return ", ".join(f"{_gib(need.num_bytes)} for {need.what}" for need in by_size)


@contextmanager
def memory_for(what: str, lower: str) -> Iterator[None]:
    """Turn a device's refusal into a StartupError that names what was being made room for and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the device has no memory left for {what}: {lower}") from error


def peak_bytes(device: torch.device, before: int) -> int:
    """The most memory in use since `reset_peak`, beyond what was in use then."""
    return max(0, torch.cuda.max_memory_allocated(device) - before) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> int:
    """Begin to watch; returns the bytes in use."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def training_bytes(num_weights: int, num_head_weights: int, serving_bytes: int) -> int:
    """What a learner of so many weights holds on its device while it updates.

    In fp32: masters, anchor, gradients, two moments for each arm, the copies of masters and moments that an update is
    undone from, and where it exchanges tokens, another copy of the masters and the rows of the head three times. As
    they are served: replica, served, staged and previous weights.
    """
    masters, anchor, gradients, undo, exchanged = (4 * num_weights for _ in range(5))
    moments, rows = 8 * (num_weights + num_head_weights), 12 * num_head_weights
    return masters + anchor + gradients + undo + exchanged + rows + moments + 8 * num_weights + 4 * serving_bytes


def feedback_bytes(*, max_sequences: int, places: int, width: int, hidden: int, top: int, itemsize: int) -> int:
    """The tables in which running sequences collect what may be learnt from them."""
    per_place = (width + hidden) * itemsize + 6 * top + 8 + 8 + 4 + 1
    return max_sequences * places * per_place


def total_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
