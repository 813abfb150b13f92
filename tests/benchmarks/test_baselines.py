"""Baselines are plug-ins: known once they are registered, they serve as they are trained, and change no token."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import baselines
from drafters.folders import kind_of
from drafters.network.checkpoint import DrafterError
from drafters.trained_kinds import MOVED_KINDS, trained_kind
from drafters.training.corpus import Batch, Example
from drafters.training.initialise import TargetEnd, initialise
from drafters.training.objective import Objective, ObjectiveSettings
from service.assembly import assemble
from tests.drafters.network.parts import tiny_drafter, tiny_embedding
from tests.drafters.network.test_serving_equals_training import ROWS, Serving, Text, assert_near
from tests.drafters.training.parts import HIDDEN, repeating_example
from tests.service.bench.parts import assembled, save_drafter, save_two_layers
from tests.service.learning_parts import requests, texts
from tests.tiny_models import VOCAB_SIZE, random_prompts


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    baselines.register()


@pytest.mark.parametrize("kind", MOVED_KINDS)
def test_the_forward_of_serving_is_that_of_training(kind: str) -> None:
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape)
    feed = Serving(model, Text(model))
    feed.commit([5, 7])
    feed.forward.ingest(ROWS, feed.state.take(ROWS, 8))
    feed.commit([3, 1])
    states, _ = feed.first()
    training = model.structure.training(model, feed.text.embed)
    _, expected = training.first(feed.text.batch(), (feed.end - 1)[:, None])
    assert_near(states, expected.states)


@pytest.mark.parametrize("kind", MOVED_KINDS)
def test_it_learns(kind: str) -> None:
    text, drawn = repeating_example(7, 30), torch.Generator().manual_seed(0)
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape).requires_grad_(True)
    objective = Objective(model, tiny_embedding(HIDDEN), ObjectiveSettings(rank_rows=8, valid_prefix=False))
    optimizer, found = torch.optim.Adam(model.parameters(), lr=0.01), list[float]()
    for _ in range(12):
        loss = objective(Batch.of([text], model.config.reach, "cpu"), drawn).draft_loss
        found.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found[-1] < found[0]


def test_medusa_begins_with_what_the_targets_head_says_of_the_highest_tap() -> None:
    model = tiny_drafter(kind="medusa", **trained_kind("medusa").shape)
    end = TargetEnd([torch.nn.Identity()] * 3, torch.nn.RMSNorm(HIDDEN), torch.randn(VOCAB_SIZE, HIDDEN))
    examples: list[Example] = []
    drawn = torch.Generator()
    initialise(model, end, tiny_embedding(HIDDEN), examples, positions=1, generator=drawn)
    weight = model.input_layer.condition_proj.weight
    assert torch.equal(weight[:, 2 * HIDDEN :], torch.eye(HIDDEN))
    assert not weight[:, : 2 * HIDDEN].any()


@pytest.mark.parametrize("kind", MOVED_KINDS)
def test_a_folder_of_the_kind_serves_and_changes_no_token(kind: str, tmp_path: Path) -> None:
    plain = assembled(save_two_layers(tmp_path / "model"))
    folder = save_drafter(tmp_path / "drafter", plain, kind=kind, **trained_kind(kind).shape)
    changes: dict[str, Any] = {"drafter": "auto", "drafter_path": folder, "budget_policy": "fixed"}
    assembly = assemble(plain.config.model_copy(update=changes))
    assert kind_of(folder) == kind
    assert assembly.drafter_name == f"memory+{kind}"
    asked = requests(list(random_prompts(4, 10)), temperature=0.9, tokens=16)
    engine = assembly.engine(assembly.drafter(kind))
    assert texts(engine, asked) == texts(assembly.engine(assembly.drafter("none")), asked)
    assert engine.drafter.num_blocks > 0


def test_without_them_a_folder_says_where_its_kind_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = assembled(save_two_layers(tmp_path / "model"))
    folder = save_drafter(tmp_path / "drafter", plain, kind="falcon", **trained_kind("falcon").shape)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "baselines" not in place])
    with pytest.raises(DrafterError, match="kind 'falcon' is a plug-in of benchmarks/baselines"):
        kind_of(folder)
