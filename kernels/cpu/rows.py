"""Compiled op of `kernels.rows`."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import CStruct, call, contiguous
from kernels.rows import ExtendRows, ForwardRows, Place
from kernels.tree_attention import AttentionRows
from kernels.trees import DraftTree


def lay_out_rows(
    extends: Sequence[ExtendRows],
    nodes: Sequence[int],
    tree: DraftTree,
    slots: Tensor,
    table: Tensor,
    place: Place,
) -> ForwardRows:
    """As the reference, without `place`. # slots [rows]; table [table rows, max positions]"""
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
