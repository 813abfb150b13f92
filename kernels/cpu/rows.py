"""The compiled twin of `kernels.rows`."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import addresses, function
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
    """As the reference, without `place`."""
    assert table.is_contiguous()
    lines, width, rows = len(extends), tree.width, slots.shape[0]
    texts, read, completing = array("q"), array("q"), 0
    for extend, count in zip(extends, nodes, strict=True):
        completing += extend.completes
        texts.extend((extend.table_row, extend.start, len(extend.tokens), extend.completes, count))
        read.extend(extend.tokens)
    choosing = completing + rows - len(read)
    sizes = [[rows]] * 4 + [[lines]] * 2 + [[lines, width]] + [[choosing]] * 3 + [[completing]] * 2
    columns = [torch.empty(size, dtype=torch.int64) for size in sizes]
    ancestors = torch.empty(lines, width, width, dtype=torch.bool)
    given = [values.contiguous() for values in (slots, tree.tokens, tree.parents, tree.depths)]
    step, made = addresses(given), addresses((*columns, ancestors))
    numbers = texts.buffer_info()[0], lines, read.buffer_info()[0], width
    places = table.data_ptr(), table.shape[1]
    function("lay_out_rows", "pnpnppnp")(*numbers, step.buffer_info()[0], *places, made.buffer_info()[0])
    tokens, positions, sequence, node, table_rows, extend_end, node_slots, *chosen = columns
    attention = AttentionRows(sequence, positions, node, table_rows, extend_end, node_slots, tree.depths, ancestors)
    return ForwardRows(tokens, attention, slots, len(read), *chosen)
