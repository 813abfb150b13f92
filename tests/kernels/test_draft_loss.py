"""The reference of the draft loss against torch's own divergences, and its gradient against differences."""

import torch
from torch.nn.functional import kl_div, linear

from kernels.rank_features import draft_objective, target_divergence

torch.set_num_threads(1)


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
