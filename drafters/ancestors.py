"""Who stands above whom in a draft tree: ancestor masks and the tokens along each node's path.

Knows parents only; what a token means or whether it will be accepted is nobody's business here.
Legend: batch, nodes, depth as in drafters/tree.py.
"""

import torch
from torch import Tensor

from drafters.tree import MAX_DEPTH

_DOUBLINGS = (MAX_DEPTH - 1).bit_length()


def ancestor_matrix(parents: Tensor) -> Tensor:
    """True at [b, i, j] where node j is on the path from the root to node i, i itself included.

    parents [batch, nodes] -> [batch, nodes, nodes] bool
    """
    batch, nodes = parents.shape
    if nodes == 0:
        return parents.new_zeros(batch, 0, 0, dtype=torch.bool)
    root = torch.full((batch, 1), nodes, dtype=parents.dtype, device=parents.device)
    # The root becomes the last row, its own parent and nobody's ancestor, so that every jump is defined.
    jump = torch.cat([torch.where(parents < 0, nodes, parents), root], dim=1)  # [batch, nodes + 1]
    above = torch.eye(nodes + 1, nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    for _ in range(_DOUBLINGS):
        above = above | above.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(1, jump)
    return above[:, :nodes]


def path_tokens(tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
    """The tokens from the root's child down to each row's node; row 0 is the root, which has none.

    tokens [batch, nodes], ancestors [batch, nodes, nodes] -> [batch, nodes + 1, depth] int64, -1 padded;
    what lies deeper than `depth` is left out.
    """
    batch, nodes = tokens.shape
    level = ancestors.sum(-1) - 1  # [batch, nodes]
    column = torch.where(ancestors, level[:, None, :], depth).clamp(max=depth)  # [batch, nodes, nodes]
    paths = tokens.new_full((batch, nodes + 1, depth + 1), -1, dtype=torch.int64)
    paths[:, 1:].scatter_(2, column, tokens.long()[:, None, :].expand(-1, nodes, -1))
    return paths[:, :, :depth]
