"""Loading targets: what is taken, what is refused and how, and the cache of unpacked GGUF files."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

from service.engine import weights
from service.engine.weights import (
    EMBEDDED_NAME,
    eos_token_ids,
    kv_shape,
    load_model,
    resolve,
    unpack_gguf,
    weights_fingerprint,
)
from service.errors import StartupError
from tests.tiny_models import EOS_ID, FAMILIES, load, loaded_tiny, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_whole(family: str, tmp_path: Path) -> None:
    loaded = load(tiny_model(family, tmp_path, seed=3))
    assert loaded.eos_token_ids == {EOS_ID}
    assert loaded.max_positions == 1024
    assert loaded.model.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer.is_fast
    assert loaded.fingerprint != loaded_tiny(family).fingerprint


def test_keys_and_values_as_the_configuration_says() -> None:
    shapes = {family: loaded_tiny(family).kv_shape for family in ("llama", "mistral", "gemma", "gemma3")}
    assert {name: (s.kv_heads, s.head_dim) for name, s in shapes.items()} == {
        "llama": (2, 12),
        "mistral": (1, 12),
        "gemma": (2, 8),
        "gemma3": (2, 16),
    }
    assert all(shape.num_layers == 3 and shape.dtype == torch.float32 for shape in shapes.values())


def test_without_grouped_queries_there_are_as_many_key_heads_as_query_heads() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_embd=32, n_layer=1, n_head=4)
    shape = kv_shape(AutoModelForCausalLM.from_config(config))
    assert (shape.kv_heads, shape.head_dim) == (4, 8)


@pytest.mark.parametrize(("dim", "fits"), [(256, True), (257, False)])
def test_heads_wider_than_the_kernels_of_a_cpu_are_refused(dim: int, fits: bool) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_embd=dim, n_layer=1, n_head=1)
    model = AutoModelForCausalLM.from_config(config)
    with nullcontext() if fits else pytest.raises(StartupError, match="heads of 257 dimensions"):
        kv_shape(model)


def changed(folder: Path, **values: object) -> Path:
    """The checkpoint with other values in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        (
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 6,
                    "long_factor": [1.0] * 6,
                    "original_max_position_embeddings": 64,
                }
            },
            "longrope",
        ),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "no-such-type"}, "no-such-type"),
    ],
    ids=["dynamic", "longrope", "linear", "unknown"],
)
def test_what_cannot_be_run_exactly_is_refused(values: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=complaint):
        load(changed(tiny_model("qwen2", tmp_path), **values))


def test_without_an_eos_nothing_would_end(tmp_path: Path) -> None:
    folder = changed(tiny_model("llama", tmp_path), eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(StartupError, match="eos_token_id"):
        load(folder)


def test_eos_ids_of_both_configurations_count(tmp_path: Path) -> None:
    model = load(tiny_model("llama", tmp_path)).model
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [7, 9]
    assert eos_token_ids(model) == {EOS_ID, 7, 9}


def test_pickles_are_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(StartupError, match="safetensors"):
        load(folder)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, eos_token_id=EOS_ID)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="encoder-decoder"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}),
        ("codegen", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8}),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
    ],
)
def test_attention_that_cannot_be_replaced_is_refused(model_type: str, sizes: dict[str, int], tmp_path: Path) -> None:
    AutoConfig.for_model(model_type, vocab_size=320, eos_token_id=EOS_ID, **sizes).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=rf"{model_type}.*attention"):
        load(tmp_path)


@pytest.mark.parametrize(("name", "complaint"), [("./missing", "no such folder"), ("./missing.gguf", "no such file")])
def test_a_path_that_is_not_there_is_named(name: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=complaint):
        resolve(name, cache_dir=tmp_path)


def test_a_hub_id_is_left_to_transformers(tmp_path: Path) -> None:
    assert resolve("someone/some-model", cache_dir=tmp_path) == "someone/some-model"


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupError, match="its weights are damaged, copy or download them again"):
        load(folder)


def test_an_empty_folder_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be loaded"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_the_fingerprint_tells_weights_apart(name: str, tmp_path: Path) -> None:
    model = load(tiny_model("llama", tmp_path)).model
    before = weights_fingerprint(model)
    assert weights_fingerprint(load(tmp_path).model) == before == loaded_tiny("llama").fingerprint
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01)
    assert weights_fingerprint(model) != before


def test_the_fingerprint_tells_types_apart(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    assert load(folder).fingerprint != load(folder, torch.float16).fingerprint


class Dequantiser:
    """Stands in for the slow reading of a GGUF file; counts its calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.calls = model, 0

    def __call__(self, file: Path) -> PreTrainedModel:
        self.calls += 1
        return self.model


class Tokenizers:
    """Stands in for the tokenizer class: a GGUF file of a few bytes has no vocabulary to read."""

    @staticmethod
    def from_pretrained(folder: Path, gguf_file: str) -> Any:
        return loaded_tiny("llama").tokenizer


@pytest.fixture
def dequantiser(monkeypatch: pytest.MonkeyPatch) -> Dequantiser:
    stand_in = Dequantiser(loaded_tiny("llama").model)
    monkeypatch.setattr(weights, "_dequantised", stand_in)
    monkeypatch.setattr(weights, "AutoTokenizer", Tokenizers)
    return stand_in


def test_a_file_is_unpacked_once_per_content(dequantiser: Dequantiser, tmp_path: Path) -> None:
    file, twin = tmp_path / "a.gguf", tmp_path / "sub" / "a.gguf"
    file.write_bytes(b"weights")
    twin.parent.mkdir()
    twin.write_bytes(b"weights")
    folder = unpack_gguf(file, cache_dir=tmp_path)
    assert unpack_gguf(twin, cache_dir=tmp_path) == folder
    assert dequantiser.calls == 1
    file.write_bytes(b"other weights")
    assert unpack_gguf(file, cache_dir=tmp_path) != folder
    assert dequantiser.calls == 2
    assert (folder / "model.safetensors").is_file()


def interrupted(*args: object) -> PreTrainedModel:
    raise KeyboardInterrupt


def full_disk(*args: object) -> PreTrainedModel:
    raise OSError("no space left")


@pytest.mark.parametrize(("name", "failure"), [("_dequantised", interrupted), ("_publish", full_disk)])
def test_an_interrupted_conversion_leaves_nothing(
    name: str,
    failure: Callable[..., PreTrainedModel],
    dequantiser: Dequantiser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(weights, name, failure)
    with pytest.raises((KeyboardInterrupt, OSError)):
        unpack_gguf(file, cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.slow
def test_the_embedded_model_is_unpacked_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve(EMBEDDED_NAME, cache_dir=tmp_path)
    monkeypatch.setattr(weights, "_dequantised", interrupted)
    assert resolve(EMBEDDED_NAME, cache_dir=tmp_path) == folder
    cpu = torch.device("cpu")
    loaded = load_model(EMBEDDED_NAME, revision=None, dtype=torch.float32, device=cpu, cache_dir=tmp_path)
    assert (loaded.eos_token_ids, loaded.max_positions) == (frozenset({2}), 8192)


def test_a_second_unpacking_at_the_same_time_is_harmless(
    dequantiser: Dequantiser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process publishes between our look and our rename."""
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    publish = weights._publish

    def twice(scratch: Path, folder: Path) -> None:
        publish(scratch, folder)
        publish(scratch, folder)

    monkeypatch.setattr(weights, "_publish", twice)
    folder = unpack_gguf(file, cache_dir=tmp_path)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_saving_again_keeps_the_fingerprint(tmp_path: Path) -> None:
    first = load(tiny_model("qwen3", tmp_path / "a", seed=5)).fingerprint
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    tiny_tokenizer().save_pretrained(tmp_path / "b")
    assert load(tmp_path / "b").fingerprint == first
