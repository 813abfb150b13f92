"""The compiled twins of `kernels.entries`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.entries import EntryTables, Placed, Waiting


class _Entries(ctypes.Structure):
    """`Entries` of entries.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in EntryTables._fields),
        *((name, ctypes.c_int64) for name in ("positions", "entries", "room", "feature_bytes")),
    ]

    @staticmethod
    def of(tables: EntryTables) -> "_Entries":
        features = tables.features
        sizes = *tables.places.shape[1:], features.shape[1], features.shape[2] * features.itemsize
        return _Entries(*map(address, tables), *sizes)


def add_entries(
    tables: EntryTables,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    slots: Tensor,
    features: Tensor | None,
    tokens: Tensor | None,
) -> None:
    """As the reference."""
    given = [value.contiguous() for value in (rows, starts, counts)]
    waits = None if features is None or tokens is None else (features.to(tables.features.dtype), tokens)
    queued = [None, None] if waits is None else [value.contiguous() for value in waits]
    (batch, count), slots = slots.shape, slots.contiguous()
    known, places = ctypes.byref(_Entries.of(tables)), map(address, given)
    function("add_entries", "ppppnpnpp")(known, *places, batch, slots.data_ptr(), count, *map(address, queued))


def take_entries(tables: EntryTables, rows: Tensor, most: int) -> Waiting:
    """As the reference."""
    batch, rows = len(rows), rows.contiguous()
    features = tables.features.new_empty(batch, most, tables.features.shape[2])
    waiting = Waiting(features, *rows.new_empty(3, batch, most).unbind())
    call = function("take_entries", "ppnnpppp")
    call(ctypes.byref(_Entries.of(tables)), rows.data_ptr(), batch, most, *map(address, waiting))
    return waiting


def place_entries(
    tables: EntryTables, rows: Tensor, positions: Tensor, slots: Tensor, scratch: Tensor, size: int
) -> Placed:
    """As the reference."""
    (batch, count), entries = slots.shape, tables.places.shape[2]
    width = (count - 1) * entries + size if size else count * entries
    rows, positions, slots = rows.contiguous(), positions.contiguous(), slots.contiguous()
    placed = Placed(torch.empty_like(rows), rows.new_empty(batch, size), *rows.new_empty(3, batch, width).unbind())
    given = rows.data_ptr(), batch, positions.data_ptr(), slots.data_ptr(), count, scratch.data_ptr(), scratch.stride(0)
    call = function("place_entries", "ppnppnpnnppppp")
    call(ctypes.byref(_Entries.of(tables)), *given, size, *map(address, placed))
    return placed
