"""Losses against sums written out, and that every kind learns."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.coupling import TreeNoise
from drafters.network.config import RankHeadShape
from drafters.network.model import SpecBlock
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from drafters.training.corpus import Batch, Example, load_examples
from drafters.training.forward import forward_of
from drafters.training.objective import Objective, ObjectiveSettings, cross_entropy, total_variation
from drafters.training.output_layers import head_loss
from tests.adaptation.samples import sampled
from tests.drafters.network.parts import tiny_drafter, tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, random_shard

EMBED = tiny_embedding(HIDDEN)


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def text(tmp_path: Path) -> Example:
    """Whose tokens the target has among its likeliest."""
    random_shard(1).save(tmp_path / "a.safetensors")
    (example,) = load_examples([tmp_path / "a.safetensors"], max_length=64)
    tokens = example.tokens.clone()
    tokens[example.prompt :] = example.top_ids[:-1].gather(1, torch.arange(len(tokens) - example.prompt)[:, None] % 3)[
        :, 0
    ]
    return replace(example, tokens=tokens)


def test_losses_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.0]]), torch.tensor([[0.25, 0.25, 0.125]])
    expected = -(0.5 * torch.tensor(0.25).log() + 0.3 * torch.tensor(0.25).log()).item()
    assert cross_entropy(p, q.log()).item() == pytest.approx(expected)
    assert total_variation(p, q.log()).item() == pytest.approx(0.5)


def test_the_rank_head_learns_from_the_scores_that_it_serves_with(
    text: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the ten likeliest alone their probabilities add up to one."""
    read: list[Tensor] = []
    compute = SpecBlock.rank_inputs

    def noting(model: SpecBlock, states: Tensor, features: Tensor) -> Tensor:
        read.append(features[:, :10].exp().sum(-1))
        return compute(model, states, features)

    monkeypatch.setattr(SpecBlock, "rank_inputs", noting)
    for scores in (0, 10):
        model = tiny_drafter(seed=1, block_size=BLOCK).requires_grad_(True)
        model.traits = model.traits._replace(rank_head=RankHeadShape(scores=scores))
        Objective(model, EMBED, ObjectiveSettings(rank_rows=8))(Batch.of([text], 8, "cpu"), drawn())
        labels = sampled(0).draft_labels
        noise = TreeNoise(torch.zeros(labels.count), torch.zeros(labels.count, 0, len(model.d2t)))
        head_loss(model, model.lm_head.weight, labels, labels, noise, anchor_weight=0.0)
    whole, whole_online, _, part, part_online, _ = read
    assert min(part.min(), part_online.min()) > 1 - 1e-5 > max(whole.max(), whole_online.max())


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_every_kind_learns(text: Example, kind: str) -> None:
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape).requires_grad_(True)
    objective = Objective(model, EMBED, ObjectiveSettings(rank_rows=8, valid_prefix=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch, found = Batch.of([text], model.config.reach, "cpu"), list[float]()
    for _ in range(24):
        scores = objective(batch, drawn())
        found.append(scores.draft_loss.item())
        optimizer.zero_grad()
        scores.draft_loss.backward()
        optimizer.step()
    assert found[-1] < 0.995 * found[0]


@pytest.mark.parametrize("kind", [kind for kind in TRAINED_KINDS if trained_kind(kind).config.trained_blocks > 1])
def test_a_further_block_depends_on_its_own_path_alone(text: Example, kind: str) -> None:
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape)
    batch, kept = Batch.of([text], model.config.reach, "cpu"), torch.tensor([[1, 3]])
    forward, anchors = forward_of(model, EMBED), torch.tensor([[2, 4, 5, 7]])
    _, blocks = forward.first(batch, anchors)
    part = forward.next(batch, blocks.take(kept), torch.ones_like(kept))
    whole = forward.next(batch, blocks, torch.ones_like(anchors)).take(kept)
    assert torch.equal(part.anchors, whole.anchors)
    torch.testing.assert_close((part.states, part.onward), (whole.states, whole.onward))
