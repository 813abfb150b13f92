"""Compiled ops around a step's forward, in their order: layout of rows (`kernels.rows`), choice of tokens
(`kernels.sample`), and commit (`kernels.settle`)."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import sample as reference
from kernels.cpu.library import CStruct, call, contiguous, kept
from kernels.cpu.tree_attention import PlannedRows
from kernels.rows import Ahead, ExtendRows, ForwardRows, Place
from kernels.sample import ChosenTokens, Filters
from kernels.settle import Verified
from kernels.tree_attention import MAX_DEPTH
from kernels.trees import DraftTree

_PARTS, _SPARE = 64, 8
"""Parts of a vocabulary whose maxima bound its largest scores, and maxima beyond top_k that keep that bound below the
k-th largest score."""


def lay_out_rows(
    extends: Sequence[ExtendRows],
    nodes: Sequence[int],
    tree: DraftTree,
    slots: Tensor,
    table: Tensor,
    place: Place,
    ahead: Ahead | None = None,
) -> ForwardRows:
    """Same as the reference op; `place` is not used. # slots [rows]; table [table rows, max positions]"""
    assert table.is_contiguous(), "it is changed in place"
    lines, width, rows = len(extends), tree.width, slots.shape[0]
    sequences, read, completing = array("q"), array("q"), 0
    for extend, count in zip(extends, nodes, strict=True):
        completing += extend.completes
        sequences.extend((extend.table_row, extend.start, len(extend.tokens), extend.completes, count))
        read.extend(extend.tokens)
    if ahead is not None:
        known = torch.stack([ahead.sequences, ahead.tokens, ahead.accepted], 1)
        for index, token, accepted in known.tolist():  # planned transfer: none, it is on the host
            read[index] = token
            sequences[index * len(sequences) // lines + 1] += accepted  # its start
    laid_out, written = _rows_of(lines, width, rows, len(read), completing)
    drafted = CStruct(*contiguous(slots, tree.tokens, tree.parents, tree.depths))
    call("lay_out_rows", sequences.tobytes(), lines, read.tobytes(), width, drafted, table, table.shape[1], written)
    return laid_out


@kept
def _rows_of(lines: int, width: int, rows: int, read: int, completing: int) -> tuple[ForwardRows, CStruct]:
    """Make the rows of a forward, and the C structure `Columns` of rows.cpp that fills them in."""
    choosing, ancestors = completing + rows - read, torch.empty(lines, width, width, dtype=torch.bool)
    sizes = [[rows]] * 5 + [[lines]] * 2 + [[lines, width]] * 2 + [[choosing]] * 3 + [[completing]] * 2
    columns = [torch.empty(size, dtype=torch.int64) for size in sizes]
    tokens, positions, sequence, node, slots, table_rows, ends, node_slots, depths, *chosen = columns
    attention = PlannedRows(sequence, positions, node, table_rows, ends, node_slots, depths, ancestors)
    return ForwardRows(tokens, attention, slots, read, *chosen), CStruct(*columns, ancestors)


def choose_likeliest(scores: Tensor) -> ChosenTokens:
    """Same as the reference op. # [rows, vocab] -> [rows]"""
    return _choose(scores, None, None, None)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> ChosenTokens:
    """Same as the reference op, except that the noise's logarithm may differ in its last bit.
    # logits [rows, vocab] -> [rows]"""
    if filters is None:
        return _choose(logits, *contiguous(seeds, positions, temperatures))
    few = _contenders(logits, temperatures, filters)
    if few is None:
        return reference.sample(logits, seeds, positions, temperatures, filters, noise=noise_of_tokens)
    ids, drawn = few.to(torch.int32), (seeds, positions, temperatures, filters)
    chosen = reference.sample(logits[:, few], *drawn, noise=lambda keys, _: noise_of_tokens(keys, ids))
    return ChosenTokens(few[chosen.tokens], chosen.bad_rows)


def _contenders(logits: Tensor, temperatures: Tensor, filters: Filters) -> Tensor | None:
    """Return ascending ids that include all tokens which top_k can keep in any row, or None where that is not certain
    (a row without top_k, a score that is not finite, equal scores at the border). Of the maxima of `_PARTS` parts of
    a row the n-th largest is at most the row's n-th largest score. # logits [rows, vocab] -> [few] int64"""
    most = int(filters.top_k.max())
    if (
        not 0 < most <= _PARTS - _SPARE
        or logits.shape[1] % _PARTS
        or bool(((filters.top_k <= 0) & (temperatures > 0)).any())
    ):
        return None
    peaks = logits.view(len(logits), _PARTS, -1).amax(-1).float()
    if not bool(peaks.isfinite().all()):
        return None
    best = peaks.topk(most + _SPARE).values
    floor = best[:, -1:]
    few = (logits >= floor).any(0).nonzero().squeeze(1)
    warm = temperatures > 0
    scaled = logits[:, few].float().sub_(best[:, :1]).div_(temperatures.where(warm, 1.0)[:, None])
    below = (floor - best[:, :1]) / temperatures.where(warm, 1.0)[:, None]  # no other token is scored higher
    certain = scaled.topk(most).values[:, -1:] > below
    return few if bool((certain.squeeze(1) | ~warm).all()) else None


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """Same as the reference op, except that the logarithm may differ in its last bit.
    # keys [rows, 2], tokens [picked] -> [rows, picked]"""
    noise = torch.empty(keys.shape[0], tokens.shape[0])
    call("gumbel_noise", keys, tokens, noise, *noise.shape)
    return noise


def _choose(scores: Tensor, *drawn: Tensor | None) -> ChosenTokens:
    chosen, scores = _choice_of(scores.shape[0]), scores.contiguous()
    call("choose", scores, *drawn, *scores.shape, *chosen, dtype=scores.dtype)
    return chosen


@kept
def _choice_of(rows: int) -> ChosenTokens:
    return ChosenTokens(*(torch.empty(rows, dtype=torch.int64) for _ in range(2)))


def settle(
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
) -> Verified:
    """Same as the reference op. # table [table rows, max positions]"""
    assert table.is_contiguous(), "it is changed in place"
    step = contiguous(*choice, *logits, *completing, *lines, slots, *trees, sizes)
    batch, width = completing[0].shape[0], trees[0].shape[1]
    depth, (num_sized, numbers) = min(width, MAX_DEPTH), sizes.shape
    verified, written = _verified_of(batch, width, depth, numbers)
    counts = len(choice[0]), batch, width, depth, num_sized, numbers
    call("settle", CStruct(*step), *counts, table, table.shape[1], written)
    return verified


@kept
def _verified_of(batch: int, width: int, depth: int, numbers: int) -> tuple[Verified, CStruct]:
    """Make the outcome of a step, and the C structure that fills it in."""
    each, path, emitted = [batch], [batch, depth + 1], [batch, 1 + numbers + depth + 1]
    shapes = [[batch, depth], each, each, [batch, width + 1], path, emitted, each]
    shapes += [path, path, path, each, each, [batch * width]]
    verified = Verified(*[torch.empty(shape, dtype=torch.int64) for shape in shapes])
    return verified, CStruct(*verified)
