# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The acceptance walk and the slot commit of `kernels/settle.py` on a device."""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from kernels import settle as reference
from kernels.settle import Accepted
from kernels.tree_attention import MAX_DEPTH, MAX_NODES, NULL_SLOT

_SEQUENCES = 32  # smaller batches use the kernel compiled for this size


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Accepted:
    """Same as the reference op; one program walks one tree.
    # tokens, parents [batch, nodes]; target_tokens [batch, nodes + 1]"""
    batch, nodes = tokens.shape
    depth = min(nodes, MAX_DEPTH)
    path = tokens.new_empty(batch, depth)
    num_accepted, bonus = tokens.new_empty(batch), tokens.new_empty(batch)
    _walk[(batch,)](
        *(part.contiguous() for part in (tokens, parents, num_nodes, target_tokens)),
        path, num_accepted, bonus, nodes, depth,
        NODES=triton.next_power_of_2(max(nodes, MAX_NODES)), MOST=MAX_DEPTH, enable_fp_fusion=True,
    )  # fmt: skip
    return Accepted(path, num_accepted, bonus)


@triton.jit(do_not_specialize=["nodes", "depth"])
def _walk(
    tokens: tl.tensor,
    parents: tl.tensor,
    num_nodes: tl.tensor,
    target_tokens: tl.tensor,
    path: tl.tensor,
    num_accepted: tl.tensor,
    bonus: tl.tensor,
    nodes: tl.tensor,
    depth: tl.tensor,
    NODES: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Walk from the root while a child has the target's token."""
    line, node = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    exists = node < tl.load(num_nodes + line)
    token = tl.load(tokens + line * nodes + node, mask=exists, other=-1)
    parent = tl.load(parents + line * nodes + node, mask=exists, other=-2)
    wanted = tl.load(target_tokens + line * (nodes + 1))
    here, place, walked = -1, tl.arange(0, MOST), tl.full([MOST], -1, tl.int64)
    level = 0
    while level < depth:
        child = tl.min(tl.where(exists & (parent == here) & (token == wanted), node, NODES), 0)
        found = child < NODES
        walked = tl.where((place == level) & found, child, walked)
        here = tl.where(found, child, here)
        wanted = tl.load(target_tokens + line * (nodes + 1) + 1 + here)
        level = tl.where(found, level + 1, depth)
    tl.store(path + line * depth + place, walked, mask=place < depth)
    tl.store(num_accepted + line, tl.sum((walked >= 0).to(tl.int64), 0))
    tl.store(bonus + line, wanted)


def commit_slots(
    path: Tensor,
    num_accepted: Tensor,
    num_nodes: Tensor,
    node_slots: Tensor,
    lines: Tensor,
    extend_end: Tensor,
    slot_table: Tensor,
) -> Tensor:
    """Same as the reference op; one program per sequence, which adds up the counts of all sequences before it.
    # path [batch, depth]; node_slots [batch, nodes]; slot_table [table rows, max positions]"""
    batch, nodes = node_slots.shape
    freed = node_slots.new_full((batch * nodes,), NULL_SLOT)
    if nodes:
        _commit[(batch,)](
            *(part.contiguous() for part in (path, num_accepted, num_nodes, node_slots, lines, extend_end)),
            slot_table, freed, nodes, path.shape[1], slot_table.stride(0),
            BATCH=triton.next_power_of_2(max(batch, _SEQUENCES)), NODES=triton.next_power_of_2(max(nodes, MAX_NODES)),
            MOST=MAX_DEPTH, enable_fp_fusion=True,
        )  # fmt: skip
    return freed


@triton.jit(do_not_specialize=["nodes", "depth"])
def _commit(
    path: tl.tensor,
    num_accepted: tl.tensor,
    num_nodes: tl.tensor,
    node_slots: tl.tensor,
    lines: tl.tensor,
    extend_end: tl.tensor,
    slot_table: tl.tensor,
    freed: tl.tensor,
    nodes: tl.tensor,
    depth: tl.tensor,
    line_length: tl.tensor,
    BATCH: tl.constexpr,
    NODES: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Write one sequence's path into the table, and its rejected slots after those of earlier sequences."""
    of = tl.program_id(0).to(tl.int64)
    ahead, node, sequences = tl.arange(0, MOST), tl.arange(0, NODES), tl.arange(0, BATCH)
    step = tl.load(path + of * depth + ahead, mask=ahead < depth, other=-1)
    slot = tl.load(node_slots + of * nodes + step, mask=step >= 0, other=0)
    entry = slot_table + tl.load(lines + of) * line_length + tl.load(extend_end + of) + 1
    tl.store(entry + ahead, slot, mask=step >= 0)
    before = sequences < of
    counts = tl.load(num_nodes + sequences, mask=before, other=0)
    first = tl.sum(counts - tl.load(num_accepted + sequences, mask=before, other=0), 0)
    kept = tl.sum((step[None, :] == node[:, None]).to(tl.int32), 1) > 0
    rejected = (node < tl.load(num_nodes + of)) & ~kept
    place = first + tl.cumsum(rejected.to(tl.int32), 0) - 1
    tl.store(freed + place, tl.load(node_slots + of * nodes + node, mask=rejected, other=0), mask=rejected)


settle = partial(reference.settle, accept=accept, commit_slots=commit_slots)
