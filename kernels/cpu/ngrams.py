"""The compiled twins of `kernels.ngrams`."""

import ctypes

import torch
from torch import Tensor

from kernels.cpu.library import address, function
from kernels.cpu.trees import Trees, empty_tree
from kernels.ngrams import Ahead, NgramEvidence, Ngrams, Spoken
from kernels.trees import DraftTree


class _Ngrams(ctypes.Structure):
    """`Ngrams` of ngrams.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("entries", "counts", "times", "factors")]


class _Evidence(ctypes.Structure):
    """`NgramEvidence` of ngrams.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rates", "share_edges", "count_edges", "of_depth")),
        *((name, ctypes.c_int64) for name in ("num_share_edges", "num_count_edges")),
        *((name, ctypes.c_int64) for name in ("sampled", "kind", "share", "count", "latest", "agrees")),
    ]


def add_ngrams(known: Ngrams, rows: Tensor, spoken: Spoken, weights: Tensor, times: Tensor) -> None:
    """As the reference; of several that come to a place the last one has it."""
    given = [value.contiguous() for value in (rows, *spoken, weights, times)]
    batch, nodes = spoken.tokens.shape
    call = function("add_ngrams", "ppppppppnn")
    call(ctypes.byref(_Ngrams(*map(address, known))), *map(address, given), batch, nodes)


def grow_ngrams(
    known: Ngrams, rows: Tensor, ahead: Ahead, evidence: NgramEvidence, beam: int, least: float
) -> tuple[DraftTree, Tensor]:
    """As the reference."""
    given = [value.contiguous() for value in (rows, *ahead)]
    batch, levels = ahead.guesses.shape
    tree = empty_tree(batch, levels * beam)
    buckets = torch.empty_like(tree.tokens)
    known_there, evidence_there = _Ngrams(*map(address, known)), _known(evidence)
    places = ctypes.byref(evidence_there), ctypes.byref(Trees.of(tree)), buckets.data_ptr()
    call = function("grow_ngrams", "ppppppnnnfppp")
    call(ctypes.byref(known_there), *map(address, given), batch, levels, beam, least, *places)
    return tree, buckets


def _known(evidence: NgramEvidence) -> _Evidence:
    edges = evidence.share_edges, evidence.count_edges
    adds = evidence.sampled, evidence.kind, evidence.share, evidence.count, evidence.latest, evidence.agrees
    return _Evidence(*map(address, (evidence.rates, *edges, evidence.of_depth)), *map(len, edges), *adds)
