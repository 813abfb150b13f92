"""Loading targets: what is taken, what is refused and how, from folders and files."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from service.engine.kv_pool import KVShape, LayerKV
from service.engine.shards import weights_fingerprint
from service.engine.weights import (
    EMBEDDED_NAME,
    describe,
    gguf_file,
    kv_layers,
    kv_shape,
    load_model,
    resolve,
)
from service.errors import StartupError
from tests.tiny_models import EOS_ID, FAMILIES, WINDOW, load, loaded_tiny, tiny_model, tiny_tokenizer


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
    assert {name: shape.layers for name, shape in shapes.items()} == {
        "llama": (LayerKV(2, 12),) * 3,
        "mistral": (LayerKV(1, 12, WINDOW),) * 3,
        "gemma": (LayerKV(2, 8),) * 3,
        "gemma3": (LayerKV(2, 16, WINDOW), LayerKV(2, 16), LayerKV(2, 16, WINDOW)),
    }
    assert all(shape.dtype == torch.float32 for shape in shapes.values())


def test_layers_that_read_the_keys_of_others() -> None:
    """Gemma 4: global layers have heads of their own, and the last layers read those of the last before them."""
    sizes = {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    others = {"attention_k_eq_v": True, "num_kv_shared_layers": 3, "sliding_window": 7, "layer_types": kinds}
    layers = kv_layers(AutoConfig.for_model("gemma4_text", num_hidden_layers=6, **sizes, **others))
    own = (LayerKV(4, 8, 7), LayerKV(4, 8, 7), LayerKV(2, 16))
    assert layers == (*own, LayerKV(4, 8, 7, source=1), LayerKV(4, 8, 7, source=1), LayerKV(2, 16, source=2))
    assert KVShape(layers, torch.float32).bytes_per_slot == 2 * 4 * (4 * 8 + 4 * 8 + 2 * 16)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("qwen2", {"sliding_window": 8}, [None] * 3),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ("phi3", {"sliding_window": 8, "pad_token_id": None}, [8] * 3),
        ("gpt_oss", {"sliding_window": 8}, [8, None, 8]),
    ],
)
def test_windows_as_the_configuration_says(family: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=3, **changes)
    assert [layer.window for layer in kv_layers(config) if isinstance(layer, LayerKV)] == windows


def test_without_grouped_queries_there_are_as_many_key_heads_as_query_heads() -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_embd=32, n_layer=1, n_head=4)
    shape = kv_shape(AutoModelForCausalLM.from_config(config))
    assert shape.layers == (LayerKV(4, 8),)


@pytest.mark.parametrize(("dim", "fits"), [(512, True), (513, False)])
def test_heads_wider_than_the_kernels_of_a_cpu_are_refused(dim: int, fits: bool) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=32, n_embd=dim, n_layer=1, n_head=1)
    model = AutoModelForCausalLM.from_config(config)
    with nullcontext() if fits else pytest.raises(StartupError, match="heads of 513 dimensions"):
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
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "no-such-type"}, "no-such-type"),
    ],
    ids=["dynamic", "linear", "unknown"],
)
def test_what_cannot_be_run_exactly_is_refused(values: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=complaint):
        load(changed(tiny_model("qwen2", tmp_path), **values))


def test_without_an_end_nothing_would_end(tmp_path: Path) -> None:
    folder = changed(tiny_model("llama", tmp_path), eos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(StartupError, match="eos_token_id"):
        load(folder)


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
def test_a_path_that_is_not_there_is_named(name: str, complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        gguf_file(name) or resolve(name)


def test_a_hub_id_is_left_to_transformers() -> None:
    assert resolve("someone/some-model") == "someone/some-model"


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(StartupError, match="the weights are damaged; copy or download them again"):
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


def test_the_embedded_model_in_float32() -> None:
    loaded = load_model(
        describe(EMBEDDED_NAME, revision=None, unverified=False), dtype=torch.float32, device=torch.device("cpu")
    )
    assert (loaded.eos_token_ids, loaded.max_positions) == (frozenset({0, 2}), 8192)


def test_saving_again_keeps_the_fingerprint(tmp_path: Path) -> None:
    first = load(tiny_model("qwen3", tmp_path / "a", seed=5)).fingerprint
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    tiny_tokenizer().save_pretrained(tmp_path / "b")
    assert load(tmp_path / "b").fingerprint == first
