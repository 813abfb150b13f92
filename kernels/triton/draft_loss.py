# ruff: noqa: N803 - sizes that a kernel is compiled for are written in capitals
# mypy: allow-untyped-decorators
"""The loss of `kernels/draft_loss.py` without its logits: they exist for a few rows at a time only.

The products are the library's; a kernel turns both heads' logits of a row into its divergences and, in place, into the
gradient of the loss by the logits, so that forward and backward are one. What the backward pass is asked for is only
how much the loss weighs.

    d loss / d z_v = ( P q_v - p_v  +  anchor_weight q_v (log q_v - log a_v - KL(q || a)) ) / rows,   P = sum_v p_v
"""

from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.draft_loss import DraftLoss, HeadLoss, Ranked, unchanged
from kernels.rank_features import NUM_FEATURES, TOP
from kernels.triton.rank_features import rank_features

_BLOCK = 1024
_LOGIT_BYTES = 64 << 20  # of one head; what its logits may take at once


def draft_objective(
    states: Tensor,
    anchor_head: Tensor,
    drafted: Tensor,
    top_logprobs: Tensor,
    *,
    anchor_weight: float,
    ranked: Ranked = unchanged,
) -> HeadLoss:
    """As the reference's `draft_objective`; the anchor's logits are computed anew for every head."""

    def loss(head: Tensor) -> DraftLoss:
        parts = _Loss.apply(head, states, anchor_head, drafted, top_logprobs, anchor_weight, ranked)  # type: ignore[no-untyped-call]
        return DraftLoss(*cast(tuple[Tensor, ...], parts))

    return loss


class _Loss(torch.autograd.Function):
    """Computes gradients on the way forward; backward scales them."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        head: Tensor,
        states: Tensor,
        anchor_head: Tensor,
        drafted: Tensor,
        top_logprobs: Tensor,
        anchor_weight: float,
        ranked: Ranked,
    ) -> tuple[Tensor, ...]:
        rows, at_once = states.shape[0], max(1, _LOGIT_BYTES // (head.shape[0] * 4))
        head_gradient = torch.zeros_like(head, dtype=torch.float32)
        divergences = states.new_empty(2, rows, dtype=torch.float32)
        features = states.new_empty(rows, NUM_FEATURES, dtype=torch.float32)
        ids = drafted.new_empty(rows, TOP, dtype=torch.int64)
        for start in range(0, rows, at_once):
            part = slice(start, start + at_once)
            logits = torch.mm(states[part], head.T).float()  # [some rows, vocab]
            anchored = torch.mm(states[part], anchor_head.T).float()
            features[part], ids[part] = rank_features(ranked(logits, part))
            _to_gradient(logits, anchored, drafted[part], top_logprobs[part], divergences[:, part], anchor_weight)
            gradient = logits.div_(rows).to(head.dtype)
            head_gradient += torch.mm(gradient.T, states[part])
        ctx.save_for_backward(head_gradient.to(head.dtype))
        target, anchor = divergences.mean(1)
        ctx.mark_non_differentiable(target, anchor, features, ids)
        return target + anchor_weight * anchor, target, anchor, features, ids

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *weights: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * weights[0], None, None, None, None, None, None


def _to_gradient(
    logits: Tensor, anchored: Tensor, drafted: Tensor, top_logprobs: Tensor, divergences: Tensor, anchor_weight: float
) -> None:
    """Turns logits into the gradient of rows x loss, in place; fills in both divergences.
    logits, anchored [rows, vocab] float32; drafted, top_logprobs [rows, top]; divergences [2, rows]"""
    known = drafted >= 0
    places, log_p = drafted.clamp(min=0), top_logprobs.float()
    p = log_p.exp() * known  # [rows, top]
    mass = p.sum(1)
    log_totals = torch.empty_like(mass)
    top_scores = logits.gather(1, places)
    _dense_gradient[(logits.shape[0],)](
        logits, anchored, mass, log_totals, divergences[1], logits.shape[1], anchor_weight,
        BLOCK=_BLOCK, enable_fp_fusion=True,
    )  # fmt: skip
    logits.scatter_add_(1, places, -p)
    its_log_q = top_scores - log_totals[:, None]
    divergences[0] = torch.where(known, p * (log_p - its_log_q), 0.0).sum(1)


@triton.jit
def _dense_gradient(
    logits: tl.tensor,
    anchored: tl.tensor,
    mass: tl.tensor,
    log_totals: tl.tensor,
    divergence: tl.tensor,
    vocab: tl.tensor,
    anchor_weight: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row: log sum exp and KL(q || a) in a first pass, what is dense of the gradient in a second."""
    row = tl.program_id(0).to(tl.int64)
    mine, theirs = logits + row * vocab, anchored + row * vocab
    top = tl.full([1], -1e30, tl.float32)
    their_top = tl.full([1], -1e30, tl.float32)
    total = tl.zeros([1], tl.float32)
    their_total = tl.zeros([1], tl.float32)
    apart = tl.zeros([1], tl.float32)  # sum of exp(z - top) (z - their z)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        exists = token < vocab
        z = tl.load(mine + token, mask=exists, other=-1e30)
        their_z = tl.load(theirs + token, mask=exists, other=-1e30)
        higher, their_higher = tl.maximum(top, tl.max(z, 0)), tl.maximum(their_top, tl.max(their_z, 0))
        fade, weight = tl.exp(top - higher), tl.exp(z - higher)
        total = total * fade + tl.sum(weight, 0)
        apart = apart * fade + tl.sum(weight * (z - their_z), 0)
        their_total = their_total * tl.exp(their_top - their_higher) + tl.sum(tl.exp(their_z - their_higher), 0)
        top, their_top = higher, their_higher
    log_total, their_log_total = top + tl.log(total), their_top + tl.log(their_total)
    between = their_log_total - log_total  # log q - log a = z - their z + between
    distance = apart / total + between
    share = tl.load(mass + row)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        exists = token < vocab
        z = tl.load(mine + token, mask=exists, other=-1e30)
        their_z = tl.load(theirs + token, mask=exists, other=-1e30)
        q = tl.exp(z - log_total)
        gradient = q * (share + anchor_weight * (z - their_z + between - distance))
        tl.store(mine + token, gradient, mask=exists)
    one = tl.arange(0, 1)
    tl.store(log_totals + row + one, log_total)
    tl.store(divergence + row + one, distance)
