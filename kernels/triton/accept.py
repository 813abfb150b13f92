# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The acceptance walk of `kernels/accept.py` on a device: one program walks one tree, all its nodes at a time."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.accept import Accepted
from kernels.tree_attention import MAX_DEPTH, MAX_NODES


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Accepted:
    """As the reference's `accept`."""
    # tokens, parents [batch, nodes] int64; num_nodes [batch] int64; target_tokens [batch, nodes + 1] int64
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
    """From the root, while a child carries the target's token; a first child behind the last node is none."""
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
