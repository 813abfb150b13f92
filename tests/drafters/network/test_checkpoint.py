"""Drafter files: what is saved comes back, the published form loads, and whatever does not fit is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError, TargetParts
from drafters.network.model import SpecBlock
from drafters.trained.specblock import AUTHORS
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from tests.drafters.network.parts import DRAFT_VOCAB, tiny_drafter
from tests.tiny_models import VOCAB_SIZE

HIDDEN = 48
PUBLISHED = {
    "input_layer.condition_proj.weight",
    "input_layer.condition_norm.weight",
    "input_layer.token_norm.weight",
    "input_layer.position_queries",
    "input_layer.query_norm.weight",
    "input_layer.fuse.weight",
    "shift_proj.0.weight",
    "norm.weight",
    "lm_head.weight",
    "rank_head.0.weight",
    "rank_head.2.weight",
    "t2d",
    "d2t",
}


def target() -> TargetParts:
    table = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(4))
    return TargetParts("abc", table, table)


def saved(folder: Path, *, own_head: bool = True, as_published: bool = False) -> SpecBlock:
    model = tiny_drafter(**AUTHORS if as_published else {})
    checkpoint.save(folder, model, target_identity="abc", facts={"tokens": 7}, own_head=own_head)
    return model


def load(folder: Path, parts: TargetParts | None = None) -> SpecBlock:
    return checkpoint.load(folder, parts or target(), dtype=torch.float32, device="cpu")


def rewrite(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a file; None removes one."""
    file = folder / checkpoint.WEIGHTS_FILE
    content = {**load_file(file), **tensors}
    save_file({name: value for name, value in content.items() if value is not None}, file)


def test_what_is_saved_comes_back_rounded_to_bf16(tmp_path: Path) -> None:
    model, back = saved(tmp_path), load(tmp_path)
    assert back.config.as_json == model.config.as_json
    assert back.d2t.equal(model.d2t)
    assert back.t2d.equal(model.t2d)
    for (name, before), (_, after) in zip(model.named_parameters(), back.named_parameters(), strict=True):
        assert before.bfloat16().float().equal(after), name


@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_a_file_says_its_kind_unless_it_is_the_first_one(tmp_path: Path, kind: str) -> None:
    """Of a SpecBlock's description digests were taken before there were others."""
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape)
    checkpoint.save(tmp_path, model, target_identity="abc", facts={}, own_head=True)
    back = load(tmp_path)
    assert back.config.as_json == model.config.as_json
    assert all(
        torch.equal(value.bfloat16().float(), back.state_dict()[name]) for name, value in model.state_dict().items()
    )
    spoken = json.loads((tmp_path / checkpoint.CONFIG_FILE).read_text())["drafter"].get("kind")
    assert spoken == (None if kind == "specblock" else kind)


def test_names_are_the_published_ones(tmp_path: Path) -> None:
    saved(tmp_path, as_published=True)
    names = set(load_file(tmp_path / checkpoint.WEIGHTS_FILE))
    assert names >= PUBLISHED
    assert {name for name in names - PUBLISHED if not name.startswith("layers.")} == set()


def test_the_published_form_loads(tmp_path: Path) -> None:
    """int64 distances, a head of its own, raw rank inputs: as the authors' files."""
    model = saved(tmp_path, as_published=True)
    distances = model.d2t - torch.arange(DRAFT_VOCAB)
    rewrite(tmp_path, d2t=distances, t2d=model.t2d >= 0)
    assert load(tmp_path).d2t.equal(model.d2t)


def test_a_borrowed_head_is_not_stored(tmp_path: Path) -> None:
    saved(tmp_path, own_head=False)
    assert "lm_head.weight" not in load_file(tmp_path / checkpoint.WEIGHTS_FILE)
    parts, back = target(), load(tmp_path)
    assert parts.head is not None
    assert back.lm_head.weight.equal(parts.head[back.d2t])


def test_a_borrowed_head_needs_a_tied_target(tmp_path: Path) -> None:
    saved(tmp_path, own_head=False)
    with pytest.raises(DrafterError, match="target's head is repacked"):
        load(tmp_path, TargetParts("abc", target().embedding, None))


def test_another_target_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(DrafterError, match=r"trained for target abc, but this one is xyz"):
        load(tmp_path, TargetParts("xyz", target().embedding, None))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm.weight": None}, r"parameters missing: \['norm.weight'\]"),
        ({"stranger": torch.ones(1)}, r"unknown: \['stranger'\]"),
        ({"norm.weight": torch.ones(7)}, r"norm.weight has shape \(7,\), the config asks for \(48,\)"),
        ({"d2t": torch.zeros(3, dtype=torch.int32)}, r"d2t must list 64 tokens"),
        ({"d2t": -torch.arange(DRAFT_VOCAB)}, "or one twice"),
        ({"d2t": torch.full((DRAFT_VOCAB,), VOCAB_SIZE)}, "tokens that the target does not have"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path, **tensors)
    with pytest.raises(DrafterError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "format 9, this version reads 1"),
        ({"drafter": {"surprise": 1, "tap_layers": []}}, "unknown to this version: surprise"),
        ({"drafter": {"tap_layers": [1]}}, "not a drafter's"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    saved(tmp_path)
    file = tmp_path / checkpoint.CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(DrafterError, match=message):
        load(tmp_path)


def test_layers_of_another_kind_are_refused_with_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / checkpoint.CONFIG_FILE
    described = json.loads(file.read_text())
    described["drafter"]["target"]["model_type"] = "gemma2"
    file.write_text(json.dumps(described))
    with pytest.raises(DrafterError, match=r"kind 'gemma2'.*train one for this target with `adaptree train drafter`"):
        load(tmp_path)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"config.json cannot be read"):
        load(tmp_path)
    saved(tmp_path)
    file = tmp_path / checkpoint.WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DrafterError, match=r"model.safetensors cannot be read"):
        load(tmp_path)


def test_identity_survives_a_change_of_dtype_and_nothing_else() -> None:
    table = torch.randn(VOCAB_SIZE, HIDDEN)
    config = {"hidden_size": HIDDEN, "vocab_size": VOCAB_SIZE}
    identity = checkpoint.identity_of(table, config)
    assert checkpoint.identity_of(table.bfloat16(), config) == identity
    assert checkpoint.identity_of(-table, config) != identity
    assert checkpoint.identity_of(table, {**config, "hidden_size": 64}) != identity
