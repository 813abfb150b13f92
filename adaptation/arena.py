"""Tensors that two processes compute on: one piece of memory without a name, mapped into both.

Memory of its own rather than that of /dev/shm, which containers keep small. Knows nothing of what the tensors mean.
"""

import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


Places = Mapping[str, Place]


class Arena:
    """Named tensors in shared memory. Who holds one of them keeps the memory alive."""

    def __init__(self, handle: int, places: Places) -> None:
        """`handle` is a file descriptor, inherited by the process that maps it too. Whoever opened it closes it."""
        self.handle = handle
        self.places = dict(places)
        self._memory = mmap.mmap(handle, os.fstat(handle).st_size)

    @staticmethod
    def holding(named: Mapping[str, Tensor]) -> "Arena":
        """With copies of these tensors."""
        places, size = _laid_out(named)
        handle = os.memfd_create("adaptree-training")
        os.ftruncate(handle, size)
        arena = Arena(handle, places)
        weakref.finalize(arena, os.close, handle)
        for name, tensor in named.items():
            arena[name].copy_(tensor.detach())
        return arena

    def __getitem__(self, name: str) -> Tensor:
        place = self.places[name]
        count = torch.Size(place.shape).numel()
        flat = torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=place.offset)
        return flat.view(place.shape)

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """Let these tensors be the arena's, whatever they held: parameters stay the same objects."""
        for name, tensor in named.items():
            tensor.data = self[name]


def _laid_out(named: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    places: dict[str, Place] = {}
    end = 0
    for name, tensor in named.items():
        places[name] = Place(end, tuple(tensor.shape), tensor.dtype)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end
