"""Turns a verified step into committed tokens and slots: the acceptance walk down each tree, and the slots of accepted
nodes. Reads no value back to the host.

Legend: batch = sequences that choose a token in the step, lines = all sequences of the step, nodes = padded node count,
depth = longest path that can be accepted, logits = rows that choose a token. A *tree index* is 0 for the root and 1 + i
for node i: the columns of `target_tokens`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.tree_attention import MAX_DEPTH, NULL_SLOT


class Accepted(NamedTuple):
    """The accepted path of each tree, and the target's own token after it."""

    path: Tensor  # [batch, depth] int64, node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64, nodes on the path
    bonus: Tensor  # [batch] int64, the target's token after the path


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Accepted:
    """Walk each tree from its root as long as a child has the target's token; of equal siblings, take the first.
    # tokens, parents [batch, nodes] int64, parents -1 below the root; num_nodes [batch] int64; target_tokens [batch,
    # nodes + 1] int64, the target's choice after the root and after each node"""
    nodes = tokens.shape[1]
    jump = _next_index(tokens, parents, num_nodes, target_tokens)
    depth = min(nodes, MAX_DEPTH)
    path = pad(jump[:, :1], (1, 0))  # the root and the node after it
    while path.shape[1] <= depth:  # pointer doubling: a path of n nodes is continued by n more
        jump = jump.gather(1, jump)
        path = torch.cat([path, jump.gather(1, path)], 1)
    path = path[:, : 1 + depth]
    path = path.masked_fill(path > nodes, 0)
    # parents come before children, so the last index of a path is its largest
    bonus = target_tokens.gather(1, path.amax(1, keepdim=True)).squeeze(1)
    path = path[:, 1:] - 1
    return Accepted(path, (path >= 0).sum(1), bonus)


def _next_index(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Tensor:
    """Find for each tree index the first child with the target's token, or nodes + 1 (the end, which follows itself) if
    there is none. # -> [batch, nodes + 2] int64"""
    batch, nodes = tokens.shape
    end = nodes + 1
    slots = torch.arange(1, end, device=tokens.device)
    parent_index = parents + 1
    agrees = (tokens == target_tokens.gather(1, parent_index)) & (slots <= num_nodes[:, None])
    next_index = torch.full((batch, nodes + 2), end, dtype=torch.int64, device=tokens.device)
    return next_index.scatter_reduce_(1, parent_index, torch.where(agrees, slots, end), "amin")


def commit_slots(
    path: Tensor,
    num_accepted: Tensor,
    num_nodes: Tensor,
    node_slots: Tensor,
    lines: Tensor,
    extend_end: Tensor,
    slot_table: Tensor,
) -> Tensor:
    """Write the slots of accepted nodes into the table after `extend_end`, in place, and list those of rejected nodes,
    sequence by sequence, NULL_SLOT padded.
    # path [batch, depth] int64, -1 padded; num_accepted, num_nodes, lines (rows of the table), extend_end [batch]
    int64; node_slots [batch, nodes] int64; slot_table [table rows, max positions] int64 -> [batch * nodes] int64"""
    on_path = path >= 0
    ahead = torch.arange(1, path.shape[1] + 1, device=path.device)
    line, root = lines[:, None].expand_as(path), extend_end[:, None]
    # padding rewrites the root's slot, so that the host need not know the count
    slots = torch.where(on_path, node_slots.gather(1, path.clamp(min=0)), slot_table[lines[:, None], root])
    slot_table[line, torch.where(on_path, root + ahead, root)] = slots
    return _rejected(path, num_nodes, node_slots)


def _rejected(path: Tensor, num_nodes: Tensor, node_slots: Tensor) -> Tensor:
    """List the slots of the nodes that are not on the path, NULL_SLOT padded. # -> [batch * nodes]"""
    batch, nodes = node_slots.shape
    kept = node_slots.new_zeros(batch, nodes + 1, dtype=torch.bool)
    kept.scatter_(1, torch.where(path >= 0, path, nodes), True)
    rejected = ~kept[:, :nodes] & (torch.arange(nodes, device=path.device) < num_nodes[:, None])
    flat = rejected.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, batch * nodes)
    freed = node_slots.new_full((batch * nodes + 1,), NULL_SLOT)
    return freed.scatter_(0, place, node_slots.flatten())[:-1]


class Verified(NamedTuple):
    """Outcome of a step by completing sequence (batch): the target's choices, committed tokens, and slots."""

    path: Tensor  # [batch, depth] int64, accepted node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64, nodes on the path
    bonus: Tensor  # [batch] int64, the target's own token after the path
    target_tokens: Tensor  # [batch, nodes + 1] int64, the target's choice after the root and after each node;
    # undefined for padding
    tokens: Tensor  # [batch, depth + 1] int64: accepted tokens, then the bonus token, then -1
    emitted: Tensor  # [batch, 1 + sizes + depth + 1] int64, read by the host: whether a row of the path had no finite
    # logit to choose by, then `sizes`, then `tokens`
    counts: Tensor  # [batch] int64, number of valid entries of `tokens`
    path_logits: Tensor  # [batch, depth + 1] int64, logits that chose `tokens`; undefined after the bonus token
    path_rows: Tensor  # [batch, depth + 1] int64, rows of root and accepted nodes, then the root's row as padding
    slots: Tensor  # [batch, depth + 1] int64, slots of `path_rows`
    table_rows: Tensor  # [batch] int64, rows of the slot table
    roots: Tensor  # [batch] int64, absolute positions of the roots
    freed: Tensor  # [batch * nodes] int64, slots of rejected nodes, NULL_SLOT padded


def settle(
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
    *,
    accept: Callable[..., Accepted] = accept,
    commit_slots: Callable[..., Tensor] = commit_slots,
) -> Verified:
    """Walk down each tree as far as the target agrees, and write the slots of accepted nodes into the table, in place.
    All tensors are int64.

    table [table rows, max positions]: the slot table
    choice: chosen tokens [logits], and whether each lacked a finite logit to choose by [logits]
    logits: rows, sequences in the batch, and tree indices (nodes + 1 for padding); each [logits]
    completing: lines [batch] of the sequences, and numbers of node rows [batch], padding included
    lines: rows of the table [lines], positions of roots [lines], slots of nodes [lines, nodes]
    slots [rows]: slot of each row
    trees: tokens, parents [lines, nodes] with parents before children, and numbers of nodes [lines]
    sizes [sequences, sizes]: numbers to pass to the host in `emitted`, for the first sequences; 0 for the others
    """
    (chosen, bad), (logit_rows, logit_sequence, logit_places) = choice, logits
    of, num_nodes = completing
    table_rows, roots, node_slots = (values[of] for values in lines)
    tokens, parents, tree_nodes = (values[of] for values in trees)
    batch, width = tokens.shape
    places = chosen.new_full((2, batch, width + 2), -1)  # the last column takes padding
    numbered = torch.stack([chosen, torch.arange(chosen.shape[0], device=chosen.device)])
    places[:, logit_sequence, logit_places] = numbered
    target_tokens, logit_index = places[:, :, : width + 1]
    path, num_accepted, bonus = target_tokens[:, :0], torch.zeros_like(of), target_tokens[:, 0]
    freed = path.flatten()
    if width:
        path, num_accepted, bonus = accept(tokens, parents, tree_nodes, target_tokens)
        freed = commit_slots(path, num_accepted, num_nodes, node_slots, table_rows, roots, table)
    path_logits = logit_index.gather(1, pad(path + 1, (1, 0))).clamp(min=0)
    path_rows = logit_rows[path_logits]
    emitted = _emitted(tokens, path, num_accepted, bonus)
    has_failed = bad[path_logits].amax(1, keepdim=True)  # rejected nodes may have no finite score
    return Verified(
        path=path,
        num_accepted=num_accepted,
        bonus=bonus,
        target_tokens=target_tokens,
        tokens=emitted,
        emitted=torch.cat([has_failed, pad(sizes, (0, 0, 0, batch - sizes.shape[0])), emitted], dim=1),
        counts=num_accepted + 1,
        path_logits=path_logits,
        path_rows=path_rows,
        slots=slots[path_rows],
        table_rows=table_rows,
        roots=roots,
        freed=freed,
    )


def _emitted(tokens: Tensor, path: Tensor, num_accepted: Tensor, bonus: Tensor) -> Tensor:
    """List accepted tokens, then the bonus token, then -1. # tokens [batch, nodes] -> [batch, depth + 1] int64"""
    if not tokens.shape[1]:
        return bonus[:, None]
    accepted = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return pad(accepted, (0, 1), value=-1).scatter(1, num_accepted[:, None], bonus[:, None])
