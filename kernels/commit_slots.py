"""Slots after a verify: accepted nodes' slots join the slot table, the others' become free. Nothing is copied.
Legend: batch = sequences in the step, nodes = padded node count, depth = longest path that can be accepted."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.tree_attention import NULL_SLOT


class CommittedSlots(NamedTuple):
    """Which slots were kept and which are free."""

    path: Tensor  # [batch, depth] int64, slots of the accepted nodes, NULL_SLOT padded
    freed: Tensor  # [batch * nodes] int64, slots of rejected nodes, sequence by sequence, NULL_SLOT padded


def commit_slots(
    path: Tensor,
    num_accepted: Tensor,
    num_nodes: Tensor,
    node_slots: Tensor,
    lines: Tensor,
    extend_end: Tensor,
    slot_table: Tensor,
) -> CommittedSlots:
    """Writes the accepted nodes' slots behind `extend_end` into the table, in place.
    # path [batch, depth] int64, -1 padded; num_accepted, num_nodes, lines of the table, extend_end [batch] int64;
    node_slots [batch, nodes] int64; slot_table [table rows, max positions] int64"""
    on_path = path >= 0
    path_slots = node_slots.gather(1, path.clamp(min=0)) * on_path
    ahead = torch.arange(1, path.shape[1] + 1, device=path.device)
    line, root = lines[:, None].expand_as(path), extend_end[:, None]
    # where nothing was accepted the root's slot is written again, so that no number has to be known
    slots = torch.where(on_path, path_slots, slot_table[lines[:, None], root])
    slot_table[line, torch.where(on_path, root + ahead, root)] = slots
    return CommittedSlots(path_slots, _rejected(path, num_nodes, node_slots))


def _rejected(path: Tensor, num_nodes: Tensor, node_slots: Tensor) -> Tensor:
    """# -> [batch * nodes]"""
    batch, nodes = node_slots.shape
    kept = node_slots.new_zeros(batch, nodes + 1, dtype=torch.bool)
    kept.scatter_(1, torch.where(path >= 0, path, nodes), True)
    rejected = ~kept[:, :nodes] & (torch.arange(nodes, device=path.device) < num_nodes[:, None])
    flat = rejected.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, batch * nodes)
    freed = node_slots.new_full((batch * nodes + 1,), NULL_SLOT)
    return freed.scatter_(0, place, node_slots.flatten())[:-1]
