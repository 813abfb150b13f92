"""Of a multimodal checkpoint its text model is served; what belongs to other modalities is passed over."""

import json
import resource
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from service.engine.checks import text_bytes
from service.engine.weights import LoadedModel
from service.errors import StartupError
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.service.engine.test_folders import FILE, rewritten
from tests.service.engine.test_weights import changed
from tests.tiny_models import load

PARTS = [one for one in CHECKPOINTS if one.within]
GIB = 2**30
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""Under which names files hold the text model: today's, older ones, its own."""


def renamed(folder: Path, prefix: str) -> Path:
    """The checkpoint with the text model's weights under this prefix, and the output layer beside them."""

    def name(key: str) -> str:
        if key.endswith("lm_head.weight"):
            return "language_model.lm_head.weight" if prefix.startswith("language_model") else "lm_head.weight"
        _, found, rest = key.rpartition("language_model.")
        return prefix + rest.removeprefix("model.") if found else key

    save_file({name(key): value for key, value in load_file(folder / FILE).items()}, folder / FILE, {"format": "pt"})
    return folder


def assert_same(one: LoadedModel, other: LoadedModel) -> None:
    ours, theirs = one.model.state_dict(), other.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("checkpoint", PARTS, ids=str)
def test_the_text_model_is_the_same_as_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = made(checkpoint)
    alone = load(save(model, tmp_path / "alone"))
    for prefix in PREFIXES:
        folder = renamed(save(model, tmp_path / prefix, within=checkpoint.within), prefix)
        assert any("vision" in key or "visual" in key for key in load_file(folder / FILE))
        found = load(folder)
        assert_same(found, alone)
        assert text_bytes([folder / FILE]) == text_bytes([tmp_path / "alone" / FILE])
        assert found.model.config.model_type == checkpoint.model_type
        assert (found.read_bytes, found.kv_shape) == (alone.read_bytes, alone.kv_shape)


def test_a_weight_too_many_in_the_text_is_named(tmp_path: Path) -> None:
    folder = rewritten(save(made(PARTS[0]), tmp_path, within=PARTS[0].within), more="language_model.model.extra.weight")
    with pytest.raises(StartupError, match=r"the files contain model\.extra\.weight"):
        load(folder)


def test_a_weight_that_the_text_lacks_is_named(tmp_path: Path) -> None:
    folder = save(made(PARTS[0]), tmp_path, within=PARTS[0].within)
    name = next(key for key in load_file(folder / FILE) if key.endswith("layers.0.mlp.up_proj.weight"))
    with pytest.raises(StartupError, match=r"no weights for model\.layers\.0\.mlp\.up_proj\.weight"):
        load(rewritten(folder, without=name))


def test_ends_of_the_whole_model_end_answers(tmp_path: Path) -> None:
    folder = save(made(PARTS[0]), tmp_path, within=PARTS[0].within)
    assert load(changed(folder, eos_token_id=[7, 9])).eos_token_ids >= {7, 9}


def test_a_quantised_whole_is_refused_by_its_method(tmp_path: Path) -> None:
    folder = save(made(PARTS[0]), tmp_path, within=PARTS[0].within)
    with pytest.raises(StartupError, match="quantised by 'fp8'"):
        load(changed(folder, quantization_config={"quant_method": "fp8"}))


def test_a_tower_is_not_read(tmp_path: Path) -> None:
    """Reading its 3 GiB, which are a hole in the file, would take as much memory."""
    file = save(made(PARTS[0]), tmp_path, within=PARTS[0].within) / FILE
    whole = file.read_bytes()
    start = 8 + struct.unpack("<Q", whole[:8])[0]
    header, end = json.loads(whole[8:start]), len(whole) - start
    header["vision_tower.hole"] = {"dtype": "U8", "shape": [3 * GIB], "data_offsets": [end, end + 3 * GIB]}
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(packed)) + packed + whole[start:])
        stream.truncate(8 + len(packed) + end + 3 * GIB)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load(tmp_path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < GIB // 4
