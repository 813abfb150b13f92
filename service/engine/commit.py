"""Slots around one forward: taken for its rows before, kept for what was accepted and freed for the rest after."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from functools import partial

import torch
from torch import Tensor

from drafters.protocol import Committed, HostMetadata, Read, Scores
from drafters.tree import DraftTree, VerifyResult
from kernels.settle import Verified
from kernels.staging import send
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import ExtendRows, ForwardRows, RowLayout, flatten
from service.engine.scheduler import Scheduled
from service.engine.target import TargetOutput


def lay_out(
    extends: Items[ExtendRows],
    tree: DraftTree,
    slots: SlotPool,
    table: SlotTable,
    nodes: Items[int] | None = None,
    layout: RowLayout = flatten,
) -> ForwardRows:
    """Rows of the step in fresh slots; those of extend rows are in the table.

    `nodes` counts each tree's rows, for those who know; otherwise the device is asked.
    """
    counts: Items[int] = tree.num_nodes.tolist() if nodes is None else nodes  # planned transfer: not while serving
    num_rows = sum(extend.num_rows for extend in extends) + sum(counts)
    return layout(extends, tree, slots.allocate(num_rows), table.slots, counts)


def committed_of(
    verified: Verified,
    tree: DraftTree,
    output: TargetOutput,
    *,
    wants_scores: bool,
    host: HostMetadata | None = None,
    follow: bool = True,
) -> Committed:
    """What became permanent; of the lines of `tree` those with nodes stand first. `host` is what the host knows of the
    completing sequences; `follow` is passed on."""
    features = output.features if follow or wants_scores else None  # else nobody looks at them
    return Committed(
        rows=verified.table_rows,
        positions=verified.roots,
        slots=verified.slots,
        tokens=verified.tokens,
        counts=verified.counts,
        tree=tree.first(verified.tokens.shape[0]),
        result=VerifyResult(*verified[:4]),
        features=None if features is None else features[verified.path_rows],
        scores=_scores(output.logits, verified.path_logits, verified.counts) if wants_scores else None,
        last_logits=partial(_last_logits, output.logits, verified),
        follow=follow,
        host=host,
    )


def reads(
    items: Items[Scheduled], rows: ForwardRows, features: Tensor | None, *, follow: bool = True
) -> Iterator[Read]:
    """What the step read of prompts, sequence by sequence; a text's newest token belongs to `commit`."""
    first = 0
    features = rows.slots.new_empty(rows.num_extend_rows, 0) if features is None else features
    for item in items:
        count = item.num_rows - item.completes
        part = slice(first, first + count)
        first += item.num_rows
        if count:
            start = item.start
            ahead = item.sequence.tokens[start + 1 : start + 1 + count]
            yield Read(
                row=item.table_row,
                start=start,
                tokens=send(features.device, ahead)[0],
                slots=rows.slots[part],
                features=features[part],
                follow=follow,
            )


def _last_logits(logits: Tensor, verified: Verified) -> Tensor:
    """Of the rows that chose the last token of each. # logits [logits, vocab] -> [batch, vocab]"""
    lines = verified.path_logits.gather(1, verified.counts[:, None] - 1)
    return logits.index_select(0, lines[:, 0])


def _scores(logits: Tensor, lines: Tensor, counts: Tensor) -> Scores:
    """Logits that chose each committed token. # logits [logits, vocab]; lines [batch, depth + 1]; counts [batch]"""
    valid = torch.arange(lines.shape[1], device=lines.device) < counts[:, None]
    places = valid.flatten().nonzero()[:, 0]  # planned transfer: their number, of a step that is learnt from
    return Scores(places, logits.index_select(0, lines.flatten()[places]))
