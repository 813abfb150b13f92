"""Modules that draft, in GGUF files of targets: the same drafts as from safetensors, in blocks or not."""

import logging
import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from drafters import folders as published
from drafters.network.checkpoint import HEAD, DrafterError, weights_of
from kernels.cpu import library
from kernels.experts import QuantisedStack
from kernels.layers import QuantisedWeight
from service import doctor
from service.config import ServiceConfig
from service.drafter import choose_drafter
from tests.conformance.gguf_writer import Contents
from tests.conformance.judges import loaded
from tests.drafters.test_published import TEXT, spoken, tapped
from tests.published_forms import LAYERS, WITH_MODULES, file_with_module, parts_of
from tests.tiny_models import stock


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16])
@pytest.mark.parametrize("family", WITH_MODULES)
def test_it_drafts_what_the_module_of_safetensors_drafts(tmp_path: Path, family: str, kind: Kind) -> None:
    """Behind a text, and behind its own drafts. Norms lose at most a rounding, as files store 1 + weight."""
    file = file_with_module(tmp_path, family, kind).write(tmp_path / "a.gguf")
    assert published.kind_of(file) == "mtp"
    oracle, target = stock(tmp_path), loaded(file, torch.float32)
    theirs = published.load(tmp_path, parts_of(oracle), dtype=torch.float32, device="cpu")
    ours = published.load(file, target.parts, dtype=torch.float32, device="cpu")
    rounding = 1e-6 if kind == Kind.F32 else 1e-2
    for name, value in weights_of(theirs).items():
        torch.testing.assert_close(weights_of(ours)[name], value, rtol=0, atol=rounding)
    features = tapped(oracle, TEXT, ours.config.tap_layers)
    for count in (1, 4, len(TEXT) - 1):
        drafts = TEXT[:0]
        for _ in range(4):
            said = (spoken(one, target.parts.embedding, features, TEXT, count, drafts) for one in (theirs, ours))
            expected, found = (logits.argmax(-1) for logits in said)
            assert torch.equal(found, expected)
            drafts = expected


@pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "qwen3_5_moe_text"])
def test_quantised_blocks_stay(tmp_path: Path, family: str) -> None:
    file = file_with_module(tmp_path, family, Kind.Q5_1, wide=True).write(tmp_path / "a.gguf")
    target = loaded(file, torch.bfloat16, in_blocks=True)
    assert target.in_blocks
    _, weights = published.load_blocks(file, target.parts, dtype=torch.float32)
    dense = weights_of(published.load(file, target.parts, dtype=torch.float32, device="cpu"))
    kept = {name for name, value in weights.items() if isinstance(value, QuantisedWeight | QuantisedStack)}
    own = {name for name in kept if name.startswith("decoder.layers.0.")}
    assert {name.rpartition("layers.0.")[2] for name in own} >= {f"self_attn.{part}_proj.weight" for part in "qkvo"}
    assert any("down_proj" in name for name in own)
    assert kept - own == {HEAD}
    assert weights[HEAD] is target.parts.output
    assert weights.keys() == dense.keys()
    assert all(torch.equal(weights[name].dense(), dense[name]) for name in kept)
    assert all(torch.equal(value, dense[name]) for name, value in weights.items() if name.startswith("input_layer."))


MISSING = ("nextn.hnorm", "nextn.eh_proj", "attn_k", "ffn_up_exps", "ffn_gate_inp", "attn_output")


@pytest.mark.parametrize("name", [*MISSING, "nextn.more", "attn_more"])
def test_a_tensor_that_is_missing_or_not_known_is_named(tmp_path: Path, name: str) -> None:
    file, place = file_with_module(tmp_path, "glm4_moe", Kind.F32), f"blk.{LAYERS}.{name}.weight"
    if file.tensors.pop(place, None) is None:
        file.tensors[place] = file.tensors["output_norm.weight"]
    path, parts = file.write(tmp_path / "a.gguf"), parts_of(stock(tmp_path))
    with pytest.raises(DrafterError, match=re.escape(place)):
        published.load(path, parts, dtype=torch.float32, device="cpu")


def test_a_file_without_its_module_has_no_drafter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = file_with_module(tmp_path, "qwen3_5_text", Kind.F32)
    tensors = {name: value for name, value in file.tensors.items() if not name.startswith(f"blk.{LAYERS}.")}
    path = Contents(file.keys, tensors).write(tmp_path / "a.gguf")
    settings = ServiceConfig(model=str(path), drafter="auto", state_dir=tmp_path / "state")
    with caplog.at_level(logging.INFO):
        assert choose_drafter(settings) == ("memory", None)
        choose_drafter(settings)
    assert sum("its tensors were left out" in record.message for record in caplog.records) == 1


def test_a_file_with_its_module_takes_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the setting names it from the folder in which the command runs."""
    path, counted = file_with_module(tmp_path, "qwen3_5_text", Kind.F32).write(tmp_path / "a.gguf"), list[int]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "check_free_memory", lambda weights, pool: counted.append(weights))
    for name in ("a.gguf", str(path)):
        doctor._memory(ServiceConfig(model=name, state_dir=tmp_path / "state", device="cpu"))
    assert counted == 2 * [path.stat().st_size]
