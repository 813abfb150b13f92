"""Entries that stand on a token which was guessed wrong are told it in training, and nobody else is."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from drafters.network.model import SpecBlock
from drafters.network.structure import InputLayer
from drafters.trained_kinds import TRAINED_KINDS
from drafters.training.corpus import Batch
from drafters.training.forward import TrainingForward
from drafters.training.objective import Objective, ObjectiveSettings
from tests.drafters.network.parts import tiny_drafter, tiny_embedding
from tests.drafters.training.parts import repeating_example

BLOCK = 4
ANCHORS = torch.tensor([[6, 11], [8, 20]])


def drafter() -> SpecBlock:
    return tiny_drafter(kind="falcon", **{**TRAINED_KINDS["falcon"].shape, "block_size": BLOCK})


def batch_for(model: SpecBlock) -> Batch:
    texts = [repeating_example(5, 30), repeating_example(9, 33)]
    drawn = torch.Generator().manual_seed(3)
    examples = [replace(one, tokens=torch.randint(300, one.tokens.shape, generator=drawn)) for one in texts]
    return Batch.of(examples, model.config.reach, "cpu")


def inputs_of(model: SpecBlock, batch: Batch, told: Tensor | None) -> Tensor:
    """h0 of the entries behind the first of each anchor. # -> [batch, anchors, block - 1, hidden]"""
    heard: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: heard.append(args[0].inputs))
    TrainingForward(model, tiny_embedding(model.config.hidden_size)).first(batch, ANCHORS, told)
    inputs: Tensor = heard[0][:, -ANCHORS.shape[1] * (BLOCK - 1) :].unflatten(1, (-1, BLOCK - 1))
    return inputs


def test_who_is_told_sees_the_true_token() -> None:
    model = drafter()
    batch = batch_for(model)
    told = torch.rand(2, 2, BLOCK, generator=torch.Generator().manual_seed(0)) < 0.5
    added = inputs_of(model, batch, told) - inputs_of(drafter(), batch, None)
    embed, layer, hidden = tiny_embedding(48), model.input_layer, model.config.hidden_size
    assert isinstance(layer, InputLayer)
    for text, anchor, entry in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(1, BLOCK)).tolist():
        token = batch.tokens[text, ANCHORS[text, anchor] + 1 + entry]
        alone = layer.token_norm(embed(token))
        expected = layer.fuse.weight[:, hidden : 2 * hidden] @ alone if told[text, anchor, entry] else 0.0 * alone
        assert torch.allclose(added[text, anchor, entry - 1], expected, atol=1e-5)


def test_only_where_the_entry_before_guesses_wrong() -> None:
    model = drafter()
    batch, embed = batch_for(model), tiny_embedding(model.config.hidden_size)
    draw = partial(torch.Generator().manual_seed, 0)
    told = Objective(model, embed, ObjectiveSettings(glancing=1.0))._revealed(batch, ANCHORS, draw())
    assert told is not None
    states = TrainingForward(model, embed).first(batch, ANCHORS)[1].states
    guesses = model.d2t[model.lm_head(states).argmax(-1)]
    for text, anchor in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        start = int(ANCHORS[text, anchor]) + 2
        wrong = guesses[text, anchor, :-1] != batch.tokens[text, start : start + BLOCK - 1]
        assert told[text, anchor].tolist() == [False, *wrong.tolist()]
    half = Objective(model, embed, ObjectiveSettings(glancing=0.5))._revealed(batch, ANCHORS, draw())
    assert half is not None
    assert 0 < half.sum() < told.sum()
    assert not (half & ~told).any()


def test_the_loss_is_that_of_entries_that_were_told() -> None:
    losses = []
    for share in (0.0, 1.0):
        model = drafter()
        objective = Objective(model, tiny_embedding(48), ObjectiveSettings(glancing=share, valid_prefix=False))
        losses.append(float(objective(batch_for(model), torch.Generator().manual_seed(1)).draft_loss))
    assert losses[0] != losses[1]
