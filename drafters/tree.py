"""Draft trees and the results of their verification: tensor records that drafters and the engine share.
Legend: batch = sequences in the step, nodes = padded node count, depth = longest accepted path."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tree_attention import MAX_DEPTH as MAX_DEPTH
from kernels.tree_attention import MAX_NODES as MAX_NODES
from kernels.trees import ROOT as ROOT
from kernels.trees import DraftTree as DraftTree

Candidates = DraftTree


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of verifying one step's trees: accepted paths and target tokens."""

    path: Tensor  # [batch, depth] int64, accepted node indices from the root down, -1 padded
    num_accepted: Tensor  # [batch] int64, accepted length: nodes on the path, without root and bonus
    target_tokens: Tensor  # [batch, nodes + 1] int64, the target's choice after root and nodes; arbitrary at padding


def path_tokens(tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
    """Return for each node the tokens on its path, from the root's child down and cut at `depth`. Index 0 is the root,
    whose path is empty.
    # tokens [batch, nodes], ancestors [batch, nodes, nodes] -> [batch, nodes + 1, depth] int64, -1 padded"""
    batch, nodes = tokens.shape
    level = ancestors.sum(-1) - 1  # [batch, nodes]
    column = torch.where(ancestors, level[:, None, :], depth).clamp(max=depth)  # [batch, nodes, nodes]
    paths = tokens.new_full((batch, nodes + 1, depth + 1), -1, dtype=torch.int64)
    paths[:, 1:].scatter_(2, column, tokens.long()[:, None, :].expand(-1, nodes, -1))
    return paths[:, :, :depth]
