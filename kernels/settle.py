"""What a verified step makes permanent. Reads no value back to the host.
Legend: batch = sequences that choose a token in the step, lines = all sequences of the step, nodes = padded node count,
depth = longest path that can be accepted, logits = rows that choose a token."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.accept import Accepted, accept
from kernels.commit_slots import CommittedSlots, commit_slots


class Verified(NamedTuple):
    """What the target said of a step, by completing sequence (batch), and what becomes permanent of it."""

    path: Tensor  # [batch, depth] int64, accepted node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64, nodes on the path
    bonus: Tensor  # [batch] int64, the target's own token after the path
    target_tokens: Tensor  # [batch, nodes + 1] int64, the target's choice after the root and after each node; those
    # behind padding mean nothing
    tokens: Tensor  # [batch, depth + 1] int64: accepted tokens, then the bonus token, then -1
    emitted: Tensor  # [batch, 1 + sizes + depth + 1] int64, what the host reads: whether a row of the path had no
    # finite score to choose by, then `sizes`, then `tokens`
    counts: Tensor  # [batch] int64: valid entries of `tokens`
    path_logits: Tensor  # [batch, depth + 1] int64, lines of the logits that chose them; behind the bonus token any
    path_rows: Tensor  # [batch, depth + 1] int64, rows of root and accepted nodes; behind them the root's
    slots: Tensor  # [batch, depth + 1] int64, of those rows
    table_rows: Tensor  # [batch] int64
    roots: Tensor  # [batch] int64, absolute positions
    freed: Tensor  # [batch * nodes] int64, slots that nobody needs any more: as many as were not accepted


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
    """Walks down each tree as far as the target agrees, and writes the accepted nodes' slots into the table, in place.

    table [table rows, max positions] int64; all others int64 too
    choice: tokens [logits], and whether there was no finite score to choose each by [logits]
    logits: their rows, sequences in the batch and places in its tree: 0 the root's, 1 + i node i's, nodes + 1 padding
    completing: lines [batch] of the sequences, and rows of nodes that each has [batch], those of padding included
    lines: rows of the table [lines], positions of roots [lines], slots of nodes [lines, nodes]
    slots [rows]; trees: tokens, parents [lines, nodes], numbers of nodes [lines], parents before children
    sizes [first of the batch, sizes]: what else the host is to read; of the others it reads 0
    """
    return settle_with(accept, commit_slots, table, choice, logits, completing, lines, slots, trees, sizes)


def settle_with(
    accept: Callable[..., Accepted],
    commit_slots: Callable[..., CommittedSlots],
    table: Tensor,
    choice: tuple[Tensor, Tensor],
    logits: tuple[Tensor, Tensor, Tensor],
    completing: tuple[Tensor, Tensor],
    lines: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    trees: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
) -> Verified:
    """`settle`, by these ways to walk and to commit."""
    (chosen, bad), (logit_rows, logit_sequence, logit_places) = choice, logits
    of, num_nodes = completing
    table_rows, roots, node_slots = (values[of] for values in lines)
    tokens, parents, tree_nodes = (values[of] for values in trees)
    batch, width = tokens.shape
    places = chosen.new_full((2, batch, width + 2), -1)  # behind the nodes' places one that takes padding
    numbered = torch.stack([chosen, torch.arange(chosen.shape[0], device=chosen.device)])
    places[:, logit_sequence, logit_places] = numbered
    target_tokens, logit_index = places[:, :, : width + 1]
    path, num_accepted, bonus = target_tokens[:, :0], torch.zeros_like(of), target_tokens[:, 0]
    freed = path.flatten()
    if width:
        path, num_accepted, bonus = accept(tokens, parents, tree_nodes, target_tokens)
        freed = commit_slots(path, num_accepted, num_nodes, node_slots, table_rows, roots, table).freed
    path_logits = logit_index.gather(1, pad(path + 1, (1, 0))).clamp(min=0)
    path_rows = logit_rows[path_logits]
    emitted = _emitted(tokens, path, num_accepted, bonus)
    has_failed = bad[path_logits].amax(1, keepdim=True)  # rejected nodes may be as bad as they like
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
    """Accepted tokens, then the bonus token, then -1. # tokens [batch, nodes] -> [batch, depth + 1] int64"""
    if not tokens.shape[1]:
        return bonus[:, None]
    accepted = tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return pad(accepted, (0, 1), value=-1).scatter(1, num_accepted[:, None], bonus[:, None])
