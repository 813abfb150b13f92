# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The rank features of `kernels/lattice.py`, in one pass that reads each logit once.
A row keeps its running maximum, the sum of weights below it and their first moment (from which the entropy follows),
and the TOP best scores seen. A block is searched only while it holds a score above the lowest of these, which after the
first few blocks is seldom. Of equal scores the lower id ranks first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.lattice import GAPS, NUM_FEATURES, TOP

_BLOCK = 1024
_PLACES = 16  # TOP and NUM_FEATURES, rounded up to what a block may hold
_TOP = tl.constexpr(TOP)
_FIRST_GAP, _SECOND_GAP, _THIRD_GAP = (tl.constexpr(rank) for rank in GAPS)
_NUM_FEATURES = tl.constexpr(NUM_FEATURES)
_LEAST = tl.constexpr(-1e30)  # finite, so that it can be multiplied by a weight of 0
_NO_ID = tl.constexpr(2**31 - 1)


def rank_features(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Same as the reference op. # scores [..., vocab], any float type"""
    flat = scores.reshape(-1, scores.shape[-1])
    assert flat.stride(1) == 1, "the scores of a row stand side by side"
    features = flat.new_empty(flat.shape[0], NUM_FEATURES, dtype=torch.float32)
    ids = flat.new_empty(flat.shape[0], TOP, dtype=torch.int64)
    if flat.shape[0]:
        _features_of_row[(flat.shape[0],)](
            flat, features, ids, flat.shape[1], flat.stride(0), BLOCK=_BLOCK, PLACES=_PLACES, enable_fp_fusion=True
        )
    return features.view(*scores.shape[:-1], NUM_FEATURES), ids.view(*scores.shape[:-1], TOP)


@triton.jit
def _features_of_row(
    scores: tl.tensor,
    features: tl.tensor,
    ids: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES)
    # places beyond TOP hold what no score can replace
    best = tl.where(place < _TOP, _LEAST, float("inf"))
    best_ids = tl.full([PLACES], _NO_ID, tl.int32)
    highest = tl.full([1], _LEAST, tl.float32)
    weights = tl.zeros([1], tl.float32)
    moment = tl.zeros([1], tl.float32)  # weighted sum of (score - highest)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        score = tl.load(scores + row * stride + token, mask=token < vocab, other=_LEAST).to(tl.float32)
        higher = tl.maximum(highest, tl.max(score, 0))
        fade = tl.exp(highest - higher)
        moment = (moment + weights * (highest - higher)) * fade
        weight = tl.exp(score - higher)
        weights = weights * fade + tl.sum(weight, 0)
        moment += tl.sum(weight * (score - higher), 0)
        highest = higher
        best, best_ids = _keep_best(best, best_ids, score, token, PLACES)
    best, best_ids = _ranked(best, best_ids, place, PLACES)
    total = highest + tl.log(weights)
    logs = tl.where(place < _TOP, best - total, _LEAST)
    first = tl.max(logs, 0)
    gap_rank = tl.where(place == _TOP, _FIRST_GAP, tl.where(place == _TOP + 1, _SECOND_GAP, _THIRD_GAP))
    at_gap = tl.sum(tl.where(place[None, :] == gap_rank[:, None], tl.where(place < _TOP, logs, 0.0)[None, :], 0.0), 1)
    value = tl.where(place < _TOP, logs, first - at_gap)
    value = tl.where(place == _TOP + 3, tl.exp(first), value)
    value = tl.where(place == _TOP + 4, tl.log(weights) - moment / weights, value)
    tl.store(features + row * _NUM_FEATURES + place, value, mask=place < _NUM_FEATURES)
    best_ids = tl.where((best_ids >= 0) & (best_ids < vocab), best_ids, 0)  # NaN scores leave places without an id
    tl.store(ids + row * _TOP + place, best_ids.to(tl.int64), mask=place < _TOP)


@triton.jit
def _keep_best(
    best: tl.tensor, best_ids: tl.tensor, score: tl.tensor, token: tl.tensor, PLACES: tl.constexpr
) -> tl.tuple:
    """Update the best scores and their ids by one more block. # best, best_ids [PLACES]; score, token [BLOCK]"""
    place = tl.arange(0, PLACES)
    challenger, last = tl.max(score, 0), tl.min(best, 0)
    while challenger > last:
        its_id = tl.min(tl.where(score == challenger, token, _NO_ID), 0)
        latest = tl.max(tl.where(best == last, best_ids, -1), 0)  # among equals the highest id goes
        gone = tl.min(tl.where((best == last) & (best_ids == latest), place, PLACES), 0)
        best = tl.where(place == gone, challenger, best)
        best_ids = tl.where(place == gone, its_id, best_ids)
        score = tl.where(token == its_id, _LEAST, score)
        challenger, last = tl.max(score, 0), tl.min(best, 0)
    return best, best_ids


@triton.jit
def _ranked(best: tl.tensor, best_ids: tl.tensor, place: tl.tensor, PLACES: tl.constexpr) -> tl.tuple:
    """Sort scores and ids, highest score first, lower id first among equals."""
    mine, yours = best[:, None], best[None, :]
    before = (yours > mine) | ((yours == mine) & (best_ids[None, :] < best_ids[:, None]))
    counted = before & (place < _TOP)[None, :]
    rank = tl.sum(counted.to(tl.int32), 1)
    here = (rank[None, :] == place[:, None]) & (place < _TOP)[None, :]  # [rank, place]
    sorted_best = tl.sum(tl.where(here, best[None, :], 0.0), 1)
    return sorted_best, tl.sum(tl.where(here, best_ids[None, :], 0), 1)
