"""The draft loss: the reference against torch's own divergences and differences, the kernel against the reference."""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear

from kernels import rank_features as reference
from kernels.rank_features import draft_objective, target_divergence
from kernels.triton import rank_features as device_loss


def test_the_divergence_from_the_target_is_torchs_where_all_tokens_can_be_drafted() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, target = torch.randn(2, 7, 64, generator=generator)
    ids = torch.stack([torch.randperm(64, generator=generator) for _ in range(7)])
    logs = target.log_softmax(-1).gather(1, ids)
    expected = kl_div(ours.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
    assert torch.allclose(target_divergence(ours.log_softmax(-1), ids, logs), expected, atol=1e-6)


def test_a_token_that_cannot_be_drafted_teaches_nothing() -> None:
    logits = torch.zeros(1, 4)
    drafted, logs = torch.tensor([[2, -1]]), torch.tensor([[0.5, 0.5]]).log()
    assert torch.allclose(
        target_divergence(logits.log_softmax(-1), drafted, logs), 0.5 * (torch.tensor(0.5 / 0.25)).log()
    )
    assert target_divergence(logits.log_softmax(-1), torch.tensor([[-1, -1]]), torch.tensor([[-torch.inf, 0.0]])) == 0


def test_the_distance_to_the_anchor_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    states, (head, anchor) = torch.randn(7, 16, generator=generator), torch.randn(2, 64, 16, generator=generator)
    nothing = torch.full((7, 3), -1)
    loss = draft_objective(states, anchor, nothing, torch.zeros(7, 3), anchor_weight=0.25)(head)
    ours, theirs = linear(states, head).log_softmax(-1), linear(states, anchor).log_softmax(-1)
    expected = kl_div(theirs, ours, reduction="batchmean", log_target=True)
    assert torch.allclose(loss.anchor, expected)
    assert torch.allclose(loss.total, 0.25 * expected)


def test_the_gradient_is_that_of_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    states, (head, anchor) = torch.randn(4, 6, generator=generator), torch.randn(2, 20, 6, generator=generator)
    drafted = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(4)])
    logs = torch.randn(4, 5, generator=generator).log_softmax(-1)
    objective = draft_objective(states.double(), anchor.double(), drafted, logs, anchor_weight=0.5)
    head = head.double().requires_grad_()
    (gradient,) = torch.autograd.grad(objective(head).total, [head])
    direction = torch.randn(20, 6, generator=generator).double()
    step = 1e-2
    with torch.no_grad():
        slope = (objective(head + step * direction).total - objective(head - step * direction).total) / (2 * step)
    assert torch.allclose(slope.double(), (gradient * direction).sum(), rtol=1e-3)


HIDDEN = 24
TOLERANCES = {torch.float32: (2e-6, 2e-5), torch.bfloat16: (2e-3, 2e-2)}  # of gradients and values: atol, rtol


def _inputs(rows: int, vocab: int, top: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + vocab)
    states = torch.randn(rows, HIDDEN, generator=generator)
    head, anchor = torch.randn(2, vocab, HIDDEN, generator=generator) * 0.3
    drafted = torch.stack([torch.randperm(vocab, generator=generator)[:top] for _ in range(rows)])
    drafted[torch.rand(rows, top, generator=generator) < 0.2] = -1
    logprobs = (torch.randn(rows, top, generator=generator) - 3).log_softmax(-1) - 0.1
    return (
        *(value.to(device, dtype) for value in (states, head, anchor)),
        drafted.to(device),
        logprobs.half().to(device),
    )


def _gradient(loss: reference.DraftLoss, head: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss.total * 3, [head])
    return gradient


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "vocab", "top"), [(1, 12, 3), (5, 1023, 64), (3, 1024, 64), (7, 1500, 64)])
def test_values_and_gradients_are_the_reference_s(
    rows: int, vocab: int, top: int, dtype: torch.dtype, device: str
) -> None:
    states, head, anchor, drafted, logprobs = _inputs(rows, vocab, top, dtype, device)
    head.requires_grad_()
    loss = device_loss.draft_objective(states, anchor, drafted, logprobs, anchor_weight=0.3)(head)
    expected = reference.draft_objective(states, anchor, drafted, logprobs, anchor_weight=0.3)(head)
    atol, rtol = TOLERANCES[dtype]
    for value, wanted in zip(loss[:4], expected[:4], strict=True):
        torch.testing.assert_close(value, wanted, atol=10 * atol, rtol=rtol)
    torch.testing.assert_close(_gradient(loss, head), _gradient(expected, head), atol=atol, rtol=rtol)


def test_few_rows_at_a_time_are_the_same_rows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states, head, anchor, drafted, logprobs = _inputs(11, 700, 16, torch.float32, device)
    noise = 5 * torch.randn(11, 700, generator=torch.Generator().manual_seed(0)).to(device)

    def objective(made: ModuleType) -> reference.DraftLoss:
        def ranked(logits: Tensor, rows: slice) -> Tensor:
            return logits + noise[rows]

        loss: reference.DraftLoss = made.draft_objective(
            states, anchor, drafted, logprobs, anchor_weight=1.0, ranked=ranked
        )(head)
        return loss

    whole = objective(reference)
    monkeypatch.setattr(device_loss, "_LOGIT_BYTES", 4 * 700 * 3)
    pieces = objective(device_loss)
    for value, wanted in zip(pieces, whole, strict=True):
        torch.testing.assert_close(value, wanted, atol=2e-6, rtol=2e-5)


def test_a_head_that_is_the_anchor_has_no_distance_to_it(device: str) -> None:
    states, head, _, drafted, logprobs = _inputs(6, 300, 8, torch.float32, device)
    head.requires_grad_()
    nothing = torch.full_like(drafted, -1)
    loss = device_loss.draft_objective(states, head.detach(), nothing, logprobs, anchor_weight=2.0)(head)
    (gradient,) = torch.autograd.grad(loss.total, [head])
    assert abs(loss.anchor.item()) < 1e-6
    assert loss.target.item() == 0
    assert gradient.abs().max().item() < 1e-6


def test_a_step_against_the_gradient_lowers_the_loss(device: str) -> None:
    states, head, anchor, drafted, logprobs = _inputs(9, 500, 32, torch.float32, device)
    head.requires_grad_()
    before = device_loss.draft_objective(states, anchor, drafted, logprobs, anchor_weight=0.5)(head).total
    (gradient,) = torch.autograd.grad(before, [head])
    stepped = head.detach() - 0.5 * gradient
    after = device_loss.draft_objective(states, anchor, drafted, logprobs, anchor_weight=0.5)(stepped).total
    assert after.item() < before.item()
