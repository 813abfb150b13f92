"""Slots around one forward: taken for its rows before, kept for what was accepted and freed for the rest after."""

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from drafters.protocol import Committed, HostMetadata, Read, Scores
from drafters.tree import DraftTree, VerifyResult
from kernels import ops
from kernels.staging import send
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import ExtendRows, ForwardRows, flatten
from service.engine.scheduler import Scheduled
from service.engine.target import TargetOutput
from service.engine.verify import Verified


def lay_out(
    extends: Items[ExtendRows], tree: DraftTree, slots: SlotPool, table: SlotTable, nodes: Items[int] | None = None
) -> ForwardRows:
    """Rows of the step in fresh slots; extend rows are committed at once, for nothing can reject them.

    `nodes` counts each tree's, for those who know; otherwise the device is asked.
    """
    counts: Items[int] = tree.num_nodes.tolist() if nodes is None else nodes  # planned transfer: not while serving
    num_rows = sum(extend.num_rows for extend in extends) + sum(counts)
    rows = flatten(extends, tree, slots.allocate(num_rows), counts)
    on_extend = slice(rows.num_extend_rows)
    lines = rows.attention.table_rows[rows.attention.sequence[on_extend]]
    table.write(lines, rows.attention.positions[on_extend], rows.slots[on_extend])
    return rows


def commit(
    rows: ForwardRows,
    verified: Verified,
    output: TargetOutput,
    table: SlotTable,
    *,
    wants_scores: bool,
    host: HostMetadata | None = None,
    follow: bool = True,
) -> tuple[Committed, Tensor]:
    """Write accepted nodes into the slot table; says what became permanent, and which slots nobody needs any more.

    `host` is what the host knows of the completing sequences; `follow` is passed on. The slots are
    [nodes of all sequences], those that are free first, as many as nodes were not accepted.
    """
    tree, result = verified.tree, verified.result
    table_rows, roots = rows.attention.table_rows[rows.completing], rows.attention.extend_end[rows.completing]
    path_slots, freed = result.path, result.path.flatten()  # of no nodes
    if tree.width:
        node_slots = rows.attention.node_slots[rows.completing, : tree.width]
        path_slots, freed = ops.on(table.slots.device).commit_slots(
            result.path, result.num_accepted, rows.num_nodes, node_slots, table_rows, roots, table.slots
        )
    features, counts = output.features, result.num_accepted + 1
    committed = Committed(
        rows=table_rows,
        positions=roots,
        slots=torch.cat([rows.slots[rows.logit_rows[: rows.completing.shape[0], None]], path_slots], dim=1),
        tokens=_emitted(tree, result),
        counts=counts,
        tree=tree,
        result=result,
        features=None if features is None else features[rows.logit_rows[verified.path_logits]],
        scores=_scores(output.logits, verified.path_logits, counts) if wants_scores else None,
        follow=follow,
        host=host,
    )
    return committed, freed


def reads(items: Items[Scheduled], rows: ForwardRows, features: Tensor, *, follow: bool = True) -> Iterator[Read]:
    """What the step read of prompts, sequence by sequence; a text's newest token belongs to `commit`."""
    first = 0
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


def _scores(logits: Tensor, lines: Tensor, counts: Tensor) -> Scores:
    """Logits that chose each committed token. # logits [logits, vocab]; lines [batch, depth + 1]; counts [batch]"""
    valid = torch.arange(lines.shape[1], device=lines.device) < counts[:, None]
    places = valid.flatten().nonzero()[:, 0]  # planned transfer: their number, of a step that is learnt from
    return Scores(places, logits.index_select(0, lines.flatten()[places]))


def _emitted(tree: DraftTree, result: VerifyResult) -> Tensor:
    """Accepted tokens, then the bonus token, then -1. # -> [batch, depth + 1] int64"""
    if not tree.width:
        return result.bonus[:, None]
    on_path = result.path >= 0
    accepted = tree.tokens.gather(1, result.path.clamp(min=0)).masked_fill(~on_path, -1)
    padded = torch.nn.functional.pad(accepted, (0, 1), value=-1)
    return padded.scatter(1, result.num_accepted[:, None], result.bonus[:, None])
