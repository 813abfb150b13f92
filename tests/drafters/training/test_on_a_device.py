"""Texts lie in memory of the host, weights on a device: everything that trains brings the ones to the others."""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest
import torch

from drafters import readback
from drafters.network.model import Embed, SpecBlock
from drafters.training.corpus import Batch, Example, load_examples
from drafters.training.initialise import InputSums, explained
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.replay import examine, replay_served
from kernels import ops
from kernels.layers import Embedding
from tests.drafters.training.parts import random_shard, trainable_drafter
from tests.service.engine.elsewhere import ELSEWHERE, claims
from tests.tiny_models import VOCAB_SIZE


@pytest.fixture(autouse=True)
def _a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    monkeypatch.setattr(readback, "clock_of", lambda device: perf_counter)
    trainable_drafter()  # its target is made once, and not while new tensors claim to be elsewhere
    with claims():
        yield


@pytest.fixture(name="examples")
def _texts_here(tmp_path: Path) -> list[Example]:
    random_shard(6).save(tmp_path / "shard.safetensors")
    return load_examples([tmp_path / "shard.safetensors"], max_length=64)


@pytest.fixture(name="served")
def _texts_of_serving(tmp_path: Path) -> list[Example]:
    """As serving hands them over: tokens on the host, what the target computed on the device."""
    random_shard(6).save(tmp_path / "served.safetensors")
    return [_moved(example, ELSEWHERE) for example in load_examples([tmp_path / "served.safetensors"], max_length=64)]


@pytest.fixture(name="model")
def _network_there() -> SpecBlock:
    model = trainable_drafter()
    model.d2t, model.t2d = model.d2t.to(ELSEWHERE), model.t2d.to(ELSEWHERE)
    return model


@pytest.fixture(name="embed")
def _table_there(model: SpecBlock) -> Embed:
    return Embedding(torch.randn(VOCAB_SIZE, model.config.hidden_size).to(ELSEWHERE))


def test_an_input_is_solved_there(model: SpecBlock, embed: Embed, examples: list[Example]) -> None:
    sums = InputSums(model.config, ELSEWHERE)
    for example in examples[:-1]:
        sums.add(example, embed)
    model.input_layer.solve(sums, torch.Generator().manual_seed(0))
    assert explained(model, embed, examples[-1:]) <= 1.0


def test_a_step_teaches_there(model: SpecBlock, embed: Embed, examples: list[Example]) -> None:
    batch = Batch.of(examples, model.config.reach, ELSEWHERE)
    scores = Objective(model, embed, ObjectiveSettings())(batch, torch.Generator().manual_seed(0))
    (scores.draft_loss + scores.rank_loss).backward()
    assert model.lm_head.weight.grad is not None


def test_a_served_text_is_the_batch_of_a_stored_one(served: list[Example], model: SpecBlock, embed: Embed) -> None:
    """The labels of a served text lie on the device, its tokens on the host."""
    stored = [_moved(example, "cpu") for example in served]
    found, expected = (Batch.of(texts, model.config.reach, ELSEWHERE) for texts in (served, stored))
    assert torch.equal(found.label_index, expected.label_index)
    assert torch.equal(found.top_logprobs, expected.top_logprobs)
    assert replay_served(model, embed, served[0]).steps > 0


@torch.no_grad()
def test_what_was_learnt_is_scored_there(model: SpecBlock, embed: Embed, examples: list[Example]) -> None:
    assert examine(model, embed, examples, batch_tokens=100, autocast=False).tree_tau >= 1.0
    assert replay_served(model, embed, examples[0]).steps > 0


def _moved(example: Example, device: torch.device | str) -> Example:
    """What the target computed for a text, there; its tokens stay."""
    labels = example.top_ids.to(device), example.top_logprobs.to(device)
    tokens, features = example.tokens, example.features.to(device)
    return Example(tokens, features, example.prompt, *labels, example.temperature)
