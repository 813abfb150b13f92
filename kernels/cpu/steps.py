"""Compiled ops around a step's forward, in their order: layout of rows (`kernels.rows`), choice of tokens
(`kernels.sample`), and commit (`kernels.settle`)."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import sample as reference
from kernels.cpu.library import CStruct, call, contiguous
from kernels.rows import ExtendRows, ForwardRows, Place
from kernels.sample import ChosenTokens, Filters, row_keys
from kernels.settle import Verified
from kernels.tree_attention import MAX_DEPTH, AttentionRows
from kernels.trees import DraftTree


def lay_out_rows(
    extends: Sequence[ExtendRows],
    nodes: Sequence[int],
    tree: DraftTree,
    slots: Tensor,
    table: Tensor,
    place: Place,
) -> ForwardRows:
    """Same as the reference op; `place` is not used. # slots [rows]; table [table rows, max positions]"""
    assert table.is_contiguous(), "it is changed in place"
    lines, width, rows = len(extends), tree.width, slots.shape[0]
    sequences, read, completing = array("q"), array("q"), 0
    for extend, count in zip(extends, nodes, strict=True):
        completing += extend.completes
        sequences.extend((extend.table_row, extend.start, len(extend.tokens), extend.completes, count))
        read.extend(extend.tokens)
    choosing = completing + rows - len(read)
    sizes = [[rows]] * 4 + [[lines]] * 2 + [[lines, width]] + [[choosing]] * 3 + [[completing]] * 2
    columns = [torch.empty(size, dtype=torch.int64) for size in sizes]
    ancestors = torch.empty(lines, width, width, dtype=torch.bool)
    drafted = CStruct(*contiguous(slots, tree.tokens, tree.parents, tree.depths))
    written, host = CStruct(*columns, ancestors), (sequences.tobytes(), lines, read.tobytes(), width)
    call("lay_out_rows", *host, drafted, table, table.shape[1], written)
    tokens, positions, sequence, node, table_rows, extend_end, node_slots, *chosen = columns
    attention = AttentionRows(sequence, positions, node, table_rows, extend_end, node_slots, tree.depths, ancestors)
    return ForwardRows(tokens, attention, slots, len(read), *chosen)


def choose_likeliest(scores: Tensor) -> ChosenTokens:
    """Same as the reference op. # [rows, vocab] -> [rows]"""
    return _choose(scores, None, None)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, filters: Filters | None = None
) -> ChosenTokens:
    """Same as the reference op, except that the noise's logarithm may differ in its last bit.
    # logits [rows, vocab] -> [rows]"""
    if filters is None:
        return _choose(logits, row_keys(seeds, positions), temperatures)
    return reference.sample(logits, seeds, positions, temperatures, filters, noise=noise_of_tokens)


def noise_of_tokens(keys: Tensor, tokens: Tensor) -> Tensor:
    """Same as the reference op, except that the logarithm may differ in its last bit.
    # keys [rows, 2], tokens [picked] -> [rows, picked]"""
    noise = torch.empty(keys.shape[0], tokens.shape[0])
    call("gumbel_noise", keys, tokens, noise, *noise.shape)
    return noise


def _choose(scores: Tensor, keys: Tensor | None, temperatures: Tensor | None) -> ChosenTokens:
    tokens, bad_rows = (torch.empty(scores.shape[0], dtype=torch.int64) for _ in range(2))
    scores = scores.contiguous()
    call("choose", scores, keys, temperatures, *scores.shape, tokens, bad_rows, dtype=scores.dtype)
    return ChosenTokens(tokens, bad_rows)


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
    each, path, emitted = [batch], [batch, depth + 1], [batch, 1 + numbers + depth + 1]
    shapes = [[batch, depth], each, each, [batch, width + 1], path, emitted, each]
    shapes += [path, path, path, each, each, [batch * width]]
    verified = Verified(*[torch.empty(shape, dtype=torch.int64) for shape in shapes])
    counts = len(choice[0]), batch, width, depth, num_sized, numbers
    call("settle", CStruct(*step), *counts, table, table.shape[1], CStruct(*verified))
    return verified
