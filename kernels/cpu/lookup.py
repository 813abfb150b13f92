"""The compiled twins of `kernels.lookup`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees, empty_tree
from kernels.lookup import Evidence, Matches, Texts
from kernels.trees import DraftTree


class _Evidence(ctypes.Structure):
    """`Evidence` of lookup.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rates", "weights", "rank_weights", "of_strength", "of_depth")),
        *((name, ctypes.c_void_p) for name in ("share_edges", "vote_edges")),
        *((name, ctypes.c_int64) for name in ("buckets", "num_share_edges", "num_vote_edges")),
        *((name, ctypes.c_int64) for name in ("sampled", "share", "votes")),
    ]


def find_matches(texts: Texts, rows: Tensor, columns: int, matches: int, reach: int) -> Matches:
    """As the reference."""
    batch, rows = len(rows), rows.contiguous()
    found, strengths = rows.new_empty(batch, matches), rows.new_empty(batch, matches)
    continuations = rows.new_empty(batch, reach + 1, matches)
    table, *marks = texts
    given = table.data_ptr(), table.shape[1], *map(address, marks), rows.data_ptr(), batch, columns, matches, reach
    call = function("find_matches", "pnppppnnnnppp")
    call(*given, found.data_ptr(), strengths.data_ptr(), continuations.data_ptr())
    return Matches(found, strengths, continuations)


def merge_copies(
    matches: Matches, temperatures: Tensor, evidence: Evidence, max_nodes: int, least: float
) -> tuple[DraftTree, Tensor]:
    """As the reference."""
    continuations = matches.continuations.contiguous()
    batch, reach, width = continuations.shape[0], continuations.shape[1] - 1, continuations.shape[2]
    tree = empty_tree(batch, min(max_nodes, reach * width))
    buckets = torch.empty(batch, reach, width, dtype=torch.int64)
    strengths, temperatures = matches.strengths.contiguous(), temperatures.contiguous()
    given = continuations.data_ptr(), strengths.data_ptr(), temperatures.data_ptr()
    known = ctypes.byref(_known(evidence))
    call = function("merge_copies", "pppnnnpfpp")
    call(*given, batch, width, reach, known, least, ctypes.byref(Trees.of(tree)), buckets.data_ptr())
    return tree, buckets


def _known(evidence: Evidence) -> _Evidence:
    tables = evidence.rates, evidence.weights, evidence.rank_weights, evidence.of_strength, evidence.of_depth
    edges = evidence.share_edges, evidence.vote_edges
    lengths = len(evidence.rates), *map(len, edges)
    return _Evidence(*map(address, (*tables, *edges)), *lengths, evidence.sampled, evidence.share, evidence.votes)
