"""Compiled ops of `kernels.entries`."""

import torch
from torch import Tensor

from kernels import entries as reference
from kernels.cpu.library import CStruct, call, contiguous, remembered
from kernels.entries import CommittedTokens, EntryTables, FirstBlocks, Placed, Recordings, Waiting


def add_entries(
    tables: EntryTables,
    rows: Tensor,
    starts: Tensor,
    counts: Tensor,
    slots: Tensor,
    features: Tensor | None,
    tokens: Tensor | None,
) -> None:
    """Same as the reference op. # slots, tokens [batch, count]"""
    rows, starts, counts, slots = contiguous(rows, starts, counts, slots)
    if features is None or tokens is None:
        waiting: list[Tensor] | tuple[None, None] = (None, None)
    else:
        waiting = contiguous(features.to(tables.features.dtype), tokens)
    batch, count = slots.shape
    call("add_entries", tables_of(tables), rows, starts, counts, batch, slots, count, *waiting)


def take_entries(tables: EntryTables, rows: Tensor, most: int) -> Waiting:
    """Same as the reference op. # rows [batch] -> [batch, most]"""
    rows = rows.contiguous()
    features = tables.features.new_empty(rows.shape[0], most, tables.features.shape[2])
    waiting = Waiting(features, *rows.new_empty(3, rows.shape[0], most).unbind())
    call("take_entries", tables_of(tables), rows, rows.shape[0], most, *waiting)
    return waiting


def place_entries(
    tables: EntryTables, rows: Tensor, positions: Tensor, slots: Tensor, scratch: Tensor, size: int
) -> Placed:
    """Same as the reference op. # positions, slots [batch, count]; scratch [batch, others]"""
    (batch, count), entries = slots.shape, tables.places.shape[2]
    width = (count - 1) * entries + size if size else count * entries
    placed = Placed(torch.empty_like(rows), rows.new_empty(batch, size), *rows.new_empty(3, batch, width).unbind())
    rows, positions, slots, scratch = contiguous(rows, positions, slots, scratch)
    block = scratch, scratch.shape[1], size
    call("place_entries", tables_of(tables), rows, batch, positions, slots, count, *block, *placed)
    return placed


def record_tokens(to: Recordings, blocks: FirstBlocks | None, of: CommittedTokens) -> None:
    """Same as the reference op, if all floats have one type. # shapes: see the three arguments"""
    dtype, sizes = of.logits.dtype, (of.rows.shape[0], of.tokens.shape[1], of.logits.shape[1])
    if to.features.dtype != dtype or of.features.dtype != dtype:
        return reference.record_tokens(to, blocks, of)
    given = CStruct(*contiguous(*of))
    call("record_tokens", _recordings_of(to), blocks and _blocks_of(blocks), given, *sizes, dtype=dtype)


@remembered
def _recordings_of(to: Recordings) -> CStruct:
    """Build the C structure `Recordings` of recordings.cpp."""
    places, *widths = to.features.shape[1], *(one.shape[2] * one.itemsize for one in (to.features, to.labels.states))
    return CStruct(*to[:2], *to.labels.fields, places, *widths, to.labels.top_ids.shape[2])


@remembered
def _blocks_of(blocks: FirstBlocks) -> CStruct:
    """Build the C structure `FirstBlocks` of recordings.cpp."""
    return CStruct(*blocks, *blocks.logits.shape[1:])


@remembered
def tables_of(tables: EntryTables) -> CStruct:
    """Build the C structure `Entries` of entries.cpp."""
    features = tables.features
    sizes = *tables.places.shape[1:], features.shape[1], features.shape[2] * features.itemsize
    return CStruct(*tables, *sizes)
