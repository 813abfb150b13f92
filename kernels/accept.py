"""The acceptance walk: how far a draft tree agrees with the target's own tokens. Reads no value back to the host.
Legend: batch = sequences in the step, nodes = padded node count, depth = longest path that can be accepted.
A *slot* is 0 for the root and 1 + i for node i: the columns of `target_tokens`."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.tree_attention import MAX_DEPTH


class Accepted(NamedTuple):
    """The path the target agrees with, and its own token after it."""

    path: Tensor  # [batch, depth] int64, node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64
    bonus: Tensor  # [batch] int64


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Accepted:
    """Walks each tree from its root while a child carries the target's token; of equal siblings the first counts.
    `parents` is -1 below the root; `target_tokens[:, 0]` follows the root and `[:, 1 + i]` follows node i."""
    # tokens, parents [batch, nodes] int64; num_nodes [batch] int64; target_tokens [batch, nodes + 1] int64
    nodes = tokens.shape[1]
    jump = _next_slots(tokens, parents, num_nodes, target_tokens)
    depth = min(nodes, MAX_DEPTH)
    path = functional.pad(jump[:, :1], (1, 0))  # the root and what follows it
    while path.shape[1] <= depth:  # as many slots again: each follows one of these by as many steps
        jump = jump.gather(1, jump)
        path = torch.cat([path, jump.gather(1, path)], 1)
    path = path[:, : 1 + depth]
    path = path.masked_fill(path > nodes, 0)
    # a parent stands before its children, so the last slot of a path is its largest
    bonus = target_tokens.gather(1, path.amax(1, keepdim=True)).squeeze(1)
    path = path[:, 1:] - 1
    return Accepted(path, (path >= 0).sum(1), bonus)


def _next_slots(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Tensor:
    """For every slot the slot of its first child with the target's token; slot nodes + 1, the end, if it has none."""
    # -> [batch, nodes + 2] int64; the end follows itself
    batch, nodes = tokens.shape
    end = nodes + 1
    slots = torch.arange(1, end, device=tokens.device)
    parent_slots = parents + 1
    agrees = (tokens == target_tokens.gather(1, parent_slots)) & (slots <= num_nodes[:, None])
    next_slot = torch.full((batch, nodes + 2), end, dtype=torch.int64, device=tokens.device)
    return next_slot.scatter_reduce_(1, parent_slots, torch.where(agrees, slots, end), "amin")
