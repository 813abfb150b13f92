"""Losses by hand, and what a tree of the target weighs by a loop over its nodes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.coupling import TreeNoise
from drafters.network.model import SpecBlock
from drafters.trained_kinds import TRAINED_KINDS
from drafters.training.corpus import Batch, Example, load_examples
from drafters.training.forward import TrainingForward
from drafters.training.objective import LOSSES, Objective, ObjectiveSettings
from drafters.training.output_layers import head_loss
from tests.adaptation.samples import sampled
from tests.drafters.network.parts import tiny_drafter, tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, random_shard, trainable_drafter

EMBED = tiny_embedding(HIDDEN)


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def text(tmp_path: Path) -> Example:
    """Whose tokens the target has among its likeliest."""
    random_shard(1, branches=2).save(tmp_path / "a.safetensors")
    (example,) = load_examples([tmp_path / "a.safetensors"], max_length=64)
    tokens = example.tokens.clone()
    tokens[example.prompt :] = example.top_ids[:-1].gather(1, torch.arange(len(tokens) - example.prompt)[:, None] % 3)[
        :, 0
    ]
    return replace(example, tokens=tokens)


def test_losses_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.0]]), torch.tensor([[0.25, 0.25, 0.125]])
    found = {name: loss.of_entries(p, q.log()).item() for name, loss in LOSSES.items()}
    cross_entropy = -(0.5 * torch.tensor(0.25).log() + 0.3 * torch.tensor(0.25).log()).item()
    assert found == pytest.approx({"cross_entropy": cross_entropy, "total_variation": 0.5, "tree": cross_entropy})


def test_total_variation_pulls_at_what_is_too_unlikely_alone() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]])
    LOSSES["total_variation"].of_entries(p, logits.log_softmax(1)).sum().backward()
    assert logits.grad is not None
    # 1 - (q_0 + 0.2 + 0.1): the gradient of -q_0.
    assert logits.grad[0].tolist() == pytest.approx([-0.25 * 0.75, 0.0625, 0.0625, 0.0625])


@pytest.mark.parametrize("entries", ["first", "all"])
def test_a_first_entry_on_another_token_is_that_of_a_text_which_has_it(text: Example, entries: str) -> None:
    model = tiny_drafter(seed=1, block_size=BLOCK, prefix_entries=entries)
    forward, batch = TrainingForward(model, EMBED), Batch.of([text], 8, "cpu")
    anchors, others = torch.tensor([[9, 14, 9]]), torch.tensor([[40, 41, 42]])
    _, first = forward.first(batch, torch.tensor([[9, 20]]))
    beside = forward.alternatives(batch, anchors, others, first)
    for number, (anchor, other) in enumerate(zip(anchors[0].tolist(), others[0].tolist(), strict=True)):
        changed = batch.tokens.clone()
        changed[0, anchor + 1] = other
        stream, _ = forward.first(replace(batch, tokens=changed), torch.tensor([[9]]))
        assert torch.allclose(beside[0, number], stream[0, anchor], atol=1e-5)


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
        model = tiny_drafter(seed=1, block_size=BLOCK, rank_scores=scores).requires_grad_(True)
        Objective(model, EMBED, of_all_positions("tree"))(Batch.of([text], 8, "cpu"), drawn())
        labels = sampled(0).draft_labels
        noise = TreeNoise(torch.zeros(labels.count), torch.zeros(labels.count, 0, len(model.d2t)))
        head_loss(model, model.lm_head.weight, labels, labels, noise, anchor_weight=0.0)
    whole, whole_online, _, part, part_online, _ = read
    assert min(part.min(), part_online.min()) > 1 - 1e-5 > max(whole.max(), whole_online.max())


def of_all_positions(loss: str) -> ObjectiveSettings:
    return ObjectiveSettings(anchored_rows=1e6, blocks=1, valid_prefix=False, rank_rows=8, loss=LOSSES[loss])


def test_a_tree_weighs_its_nodes_by_how_often_the_target_gets_there(text: Example) -> None:
    """To a drafter that finds all tokens alike an entry is worth the mass of its label, which is known for each."""
    model = trainable_drafter()
    model.lm_head.weight.detach().zero_()
    masses, odds = label_masses(text, model.t2d), said_odds(text)
    total = whole = 0.0
    for anchor in range(text.length - 1):
        reached = odds.get(anchor + 1, 1.0)
        for place in range(BLOCK):
            predicted = anchor + 2 + place
            if text.prompt <= predicted <= text.length:
                total, whole = total + reached * masses[predicted, None], whole + reached
            reached *= odds.get(predicted, 1.0)
        for number in range(2 if anchor + 1 in odds else 0):
            mass, chance = branch(text, anchor + 1, number, model.t2d)
            total, whole = total + chance * mass, whole + chance
    found = Objective(model, EMBED, of_all_positions("tree"))(Batch.of([text], 8, "cpu"), drawn())
    expected = torch.tensor(float(model.config.draft_vocab_size)).log() * total / whole
    assert found.draft_loss.item() == pytest.approx(float(expected), rel=1e-4)


def label_masses(text: Example, t2d: Tensor) -> dict[tuple[int, None], float]:
    """Of each labelled position what can be drafted."""
    drafted = t2d[text.top_ids.long()] >= 0
    shares = (text.top_logprobs.float().exp() * drafted).sum(1).tolist()
    return {(text.prompt + label, None): share for label, share in enumerate(shares)}


def said_odds(text: Example) -> dict[int, float]:
    """The target's probability of each of the response's tokens."""
    found = {}
    for place in range(text.prompt, text.length):
        ids = text.top_ids[place - text.prompt].tolist()
        rank = ids.index(int(text.tokens[place]))
        found[place] = float(text.top_logprobs[place - text.prompt, rank].float().exp())
    return found


def branch(text: Example, place: int, number: int, t2d: Tensor) -> tuple[float, float]:
    """What can be drafted behind another token there, and that token's probability."""
    said = place - text.prompt
    others = [rank for rank, token in enumerate(text.top_ids[said].tolist()) if token != int(text.tokens[place])]
    drafted = t2d[text.branch_ids[said, number].long()] >= 0
    mass = float((text.branch_logprobs[said, number].float().exp() * drafted).sum())
    return mass, float(text.top_logprobs[said, others[number]].float().exp())


def test_other_losses_do_not_look_at_branches(text: Example) -> None:
    model, none = trainable_drafter(), torch.zeros(text.length - text.prompt, 0, 64)
    plain = replace(text, branch_ids=none, branch_logprobs=none)
    for loss in ("cross_entropy", "total_variation"):
        objective = Objective(model, EMBED, of_all_positions(loss))
        with_them, without = (objective(Batch.of([one], 8, "cpu"), drawn()) for one in (text, plain))
        assert torch.equal(with_them.draft_loss, without.draft_loss)


def test_the_distance_is_that_of_the_loss_by_that_name(text: Example) -> None:
    batch = Batch.of([text], 8, "cpu")
    scores = [Objective(trainable_drafter(), EMBED, of_all_positions(loss))(batch, drawn()) for loss in LOSSES]
    assert torch.allclose(scores[0].distance, scores[1].draft_loss)
    assert not torch.allclose(scores[0].draft_loss, scores[2].draft_loss)


@pytest.mark.parametrize("kind", TRAINED_KINDS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_kind_learns_by_every_loss(text: Example, kind: str, loss: str) -> None:
    model = tiny_drafter(kind=kind, **TRAINED_KINDS[kind].shape).requires_grad_(True)
    objective = Objective(model, EMBED, ObjectiveSettings(rank_rows=8, valid_prefix=False, loss=LOSSES[loss]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch, found = Batch.of([text], model.config.reach, "cpu"), list[float]()
    for _ in range(24):
        scores = objective(batch, drawn())
        found.append(scores.draft_loss.item())
        optimizer.zero_grad()
        scores.draft_loss.backward()
        optimizer.step()
    assert found[-1] < 0.995 * found[0]  # total variation hardly slopes where nothing is in common yet
