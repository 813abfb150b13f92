"""Checkpoints that measure costs: deepened models compute and draft what the models themselves do, bit for bit; random
ones have the published shapes."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, dequantize
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.checkpoint import (
    DRAFTER,
    SHAPES,
    ZEROED,
    deepened,
    dummy_config,
    layers_in,
    place_of,
    with_experts,
    write_deepened_file,
    write_dummy,
    write_experts_file,
)
from benchmarks.gguf_shapes import Mix, Shape, write_file
from benchmarks.gpu import assembled as gpu_assembled
from benchmarks.gpu_sections import FULL
from drafters.network import checkpoint
from kernels.cpu import library
from service.assembly import Assembly, assemble
from service.bench.driver import Run, generate
from service.bench.experiment import Measure, mismatches, plain_engine, requests_from, tau
from service.config import ServiceConfig
from service.engine.checks import refuse_unsupported
from service.engine.gguf_file import load_gguf
from service.engine.gguf_reader import open_gguf
from service.errors import StartupError
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, settings_for, varied_prompts
from tests.tiny_models import SMALL, stock_tiny, tiny_model

PROMPTS = varied_prompts()[:3]
Command = Callable[..., tuple[int, str]]


SHAPE = Shape(hidden=256, layers=2, heads=4, kv_heads=2, dim=64, feed_forward=512, vocab=96)
"""Of a GGUF file."""


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "gemma2"])
def test_added_layers_add_nothing(family: str) -> None:
    model = stock_tiny(family)
    deep = deepened(model, 3)
    tokens = torch.arange(40)[None] % model.config.vocab_size
    expected, found = (one(tokens, use_cache=False, output_hidden_states=True).hidden_states for one in (model, deep))
    assert len(found) - 1 == deep.config.num_hidden_layers == 3 * model.config.num_hidden_layers
    places = layers_in(model.config.num_hidden_layers, 3)
    for layer, states in zip(places[:-1], found[1:-1], strict=True):  # the last ones are normed
        assert torch.equal(states, expected[layer + 1])
    assert torch.equal(expected[-1], found[-1])
    if family == "gemma2":
        assert deep.config.layer_types == [model.config.layer_types[layer] for layer in places]


def test_the_last_two_layers_have_no_copies() -> None:
    """A new drafter begins as a copy of them."""
    assert layers_in(4, 3) == [0, 0, 0, *[1] * 7, 2, 3]
    assert [place_of(layer, 4, 3) for layer in range(4)] == [0, 3, 10, 11]
    assert layers_in(2, 3) == [0, 0, 0, 0, 0, 1]
    assert layers_in(1, 3) == [0, 0, 0]


def test_layers_that_add_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.checkpoint._OUTPUTS", re.compile("o_proj"))
    with pytest.raises(StartupError, match="'llama' cannot be deepened"):
        deepened(stock_tiny("llama"), 2)


def runs_of(assembly: Assembly, max_tokens: int = 32) -> list[Run]:
    """Plain and drafted answers, greedy and sampled."""
    runs = []
    for temperature in (0.0, 1.0):
        requests = requests_from(PROMPTS, 0, Measure(temperature, max_tokens, len(PROMPTS), seed=1))
        runs += [generate(engine, requests) for engine in (plain_engine(assembly), assembly.engine())]
        assert mismatches(runs[-2:-1], runs[-1:]) == 0
    return runs


def assert_same(expected: list[Run], found: list[Run]) -> None:
    """Tokens, and how many drafts each step accepted."""
    one, other = (
        [(answer.token_ids, answer.accepted_per_step) for run in runs for answer in run.answers]
        for runs in (expected, found)
    )
    assert one == other
    assert tau(found) > 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_experts_compute_what_their_feed_forward_does(family: str) -> None:
    model = stock_tiny(family)
    sparse = with_experts(model, 4, 2)
    assert sparse.config.model_type == "mixtral"
    tokens = torch.arange(40)[None] % model.config.vocab_size
    expected, found = (one(tokens, use_cache=False).logits for one in (model, sparse))
    torch.testing.assert_close(found, expected)
    chosen = torch.stack(
        [layer.mlp.gate(torch.randn(64, model.config.hidden_size))[2] for layer in sparse.model.layers]
    )
    assert len(chosen.unique()) == 4, "the router chooses all experts"


def test_a_checkpoint_with_experts_is_served_like_any_other(run: Command, tmp_path: Path) -> None:
    """Its texts and its drafts are those of the model itself."""
    folder, out = tiny_model("llama", tmp_path / "model", **SMALL, num_hidden_layers=2), tmp_path / "sparse"
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    words = ("--model", folder, "--drafter-path", drafter, "--state-dir", tmp_path, "--experts", 4, "--out", out)
    assert run("checkpoint", "experts", *words)[0] == 0
    drafting = {"drafter": "specblock", "budget_policy": "fixed", "max_budget": 8}
    both = [
        assemble(settings_for(model).model_copy(update={**drafting, "drafter_path": weights}))
        for model, weights in ((folder, drafter), (out, out / DRAFTER))
    ]
    assert [one.target.runs_by_ops for one in both] == [True, True]
    assert_same(*map(runs_of, both))


def test_what_cannot_have_experts_is_refused(run: Command, tmp_path: Path) -> None:
    words = ("--state-dir", tmp_path, "--out", tmp_path / "sparse")
    for family, biased in (("qwen3", False), ("llama", True)):
        folder = tiny_model(family, tmp_path / family, **SMALL, attention_bias=biased)
        with pytest.raises(StartupError, match="only models of type llama or mistral without biases"):
            run("checkpoint", "experts", "--model", folder, *words)
    with pytest.raises(StartupError, match="--chosen 3: a row chooses among 2 experts"):
        run("checkpoint", "experts", "--model", save_two_layers(tmp_path / "a"), "--experts", 2, "--chosen", 3, *words)


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_a_deepened_checkpoint_is_served_like_any_other(run: Command, family: str, tmp_path: Path) -> None:
    """Its texts and its drafts are those of the model itself."""
    folder, out = tiny_model(family, tmp_path / "model", **SMALL, num_hidden_layers=2), tmp_path / "deep"
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    words = ("--model", folder, "--drafter-path", drafter, "--state-dir", tmp_path, "--copies", 3, "--out", out)
    assert run("checkpoint", "deepened", *words)[0] == 0
    drafting = {"drafter": "specblock", "budget_policy": "fixed", "max_budget": 8}
    both = [
        assemble(settings_for(model).model_copy(update={**drafting, "drafter_path": weights}))
        for model, weights in ((folder, drafter), (out, out / DRAFTER))
    ]
    assert [len(one.loaded.kv_shape.layers) for one in both] == [2, 6]
    assert checkpoint.describe(out / DRAFTER).config.tap_layers == (0, 3)
    name = checkpoint.WEIGHTS_FILE
    assert (out / DRAFTER / name).read_bytes() == (drafter / name).read_bytes()
    assert_same(*map(runs_of, both))


def test_a_drafter_of_another_model_is_refused(run: Command, tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    other = save_drafter(tmp_path / "drafter", assembled(tiny_model("llama", tmp_path / "other", **SMALL)))
    words = ("--model", folder, "--state-dir", tmp_path, "--out", tmp_path / "deep")
    with pytest.raises(StartupError, match="trained for another model"):
        run("checkpoint", "deepened", *words, "--drafter-path", other)
    (other / checkpoint.CONFIG_FILE).write_text("{}")
    with pytest.raises(StartupError, match="format None"):
        run("checkpoint", "deepened", *words, "--drafter-path", other)


def written(path: Path, mix: Mix = "q4_k_m") -> Path:
    write_file(path, SHAPE, list(SHAPE.matrices(mix)))
    return path


def config_of(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        intermediate_size=SHAPE.feed_forward,
        tie_word_embeddings=True,
    )


@pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0"])
def test_a_gguf_file_keeps_its_blocks(mix: Mix, tmp_path: Path) -> None:
    file, out = written(tmp_path / "a.gguf", mix), tmp_path / "deep" / "a.gguf"
    embedding = write_deepened_file(file, config_of(2).to_dict(), 3, out)
    before, after = ({tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (file, out))
    for name, tensor in after.items():
        block, number, rest = re.findall(r"^(blk\.)?(\d*)(.*)$", name)[0]
        layer = layers_in(2, 3)[int(number)] if block else 0
        own = before[f"{block}{layer}{rest}" if block else name]
        is_copy = block and int(number) != place_of(layer, 2, 3)
        adds_nothing = is_copy and rest in (".attn_output.weight", ".ffn_down.weight")
        assert tensor.tensor_type == own.tensor_type
        assert np.array_equal(tensor.data, np.zeros_like(own.data) if adds_nothing else own.data)
    assert len(after) == 3 * len(before) - 2 * 2  # embedding and last norm are there once
    logits = []
    for path, layers in ((file, 2), (out, 6)):
        model = load_gguf(open_gguf(path), config_of(layers), torch.float32, "eager", in_blocks=True)
        logits.append(model(torch.arange(40)[None]).logits)
    assert torch.equal(*logits)
    assert embedding.shape == (SHAPE.vocab, SHAPE.hidden)
    fields = [GGUFReader(path).fields for path in (file, out)]
    assert {name: fields[0][name].contents() == field.contents() for name, field in fields[1].items()} == {
        name: name not in ("GGUF.tensor_count", "llama.block_count") for name in fields[0]
    }
    assert fields[1]["llama.block_count"].contents() == 6


def test_experts_in_a_gguf_file_keep_their_blocks(tmp_path: Path) -> None:
    file, out = written(tmp_path / "a.gguf"), tmp_path / "sparse" / "a.gguf"
    embedding = write_experts_file(file, 4, 2, out)
    before, after = ({tensor.name: tensor for tensor in GGUFReader(path).tensors} for path in (file, out))
    for name, tensor in before.items():
        own = after.pop(name.replace(".weight", "_exps.weight") if ".ffn_" in name and "norm" not in name else name)
        assert tensor.tensor_type == own.tensor_type
        assert (own.data == tensor.data).all()
    assert {name: list(tensor.data.shape) for name, tensor in after.items()} == {
        f"blk.{layer}.ffn_gate_inp.weight": [4, SHAPE.hidden] for layer in range(SHAPE.layers)
    }
    fields = GGUFReader(out).fields
    assert [fields[f"llama.{name}"].contents() for name in ("expert_count", "expert_used_count")] == [4, 2]
    assert embedding.shape == (SHAPE.vocab, SHAPE.hidden)


def test_what_a_gguf_file_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = written(tmp_path / "a.gguf"), tmp_path / "deep.gguf"
    unlike = {**config_of(2).to_dict(), "layer_types": ["sliding_attention", "full_attention"]}
    with pytest.raises(StartupError, match=r"a\.gguf: only files whose layers are all alike"):
        write_deepened_file(file, unlike, 2, out)
    monkeypatch.setattr("benchmarks.checkpoint.ZEROED", ("Q6_K",))
    with pytest.raises(StartupError, match=r"blk\.0\.attn_output\.weight: zeros of type Q4_K are not known"):
        write_deepened_file(file, config_of(2).to_dict(), 2, out)


@pytest.mark.parametrize("name", ZEROED)
def test_zero_bytes_are_zeros(name: str) -> None:
    kind = GGMLQuantizationType[name]
    assert not dequantize(np.zeros((3, 4 * GGML_QUANT_SIZES[kind][1]), np.uint8), kind).any()


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)])
def test_shapes_have_the_published_number_of_weights(name: str, parameters: int) -> None:
    config = dummy_config(name)
    refuse_unsupported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(value.numel() for value in model.parameters()) == parameters
    with pytest.raises(StartupError, match=r"llama-3\.1-8b, qwen3-8b, tiny"):
        dummy_config("smollm2-135m")


def test_a_random_checkpoint_is_the_same_each_time_and_is_served_with_its_drafter(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    folder, again = (write_dummy("tiny", tmp_path / name) for name in ("first", "second"))
    assert torch.equal(torch.rand(3), expected), "other randomness is left alone"
    for file in ("model.safetensors", f"{DRAFTER}/model.safetensors"):
        assert (folder / file).read_bytes() == (again / file).read_bytes()
    drafting = {"drafter_path": folder / DRAFTER, "budget_policy": "fixed", "max_budget": 8}
    assembly = assemble(settings_for(folder).model_copy(update=drafting))
    assert assembly.drafter_name == "memory+specblock"
    assert assembly.loaded.eos_token_ids == {SHAPES["tiny"]["vocab_size"] - 1}
    assert len(runs_of(assembly)) == 4


@pytest.mark.slow
def test_the_embedded_model_answers_and_drafts_the_same_when_deepened(run: Command, tmp_path: Path) -> None:
    """Its file keeps its blocks, as a GPU's benchmark finds it too."""
    out = tmp_path / "deep"
    assert run("checkpoint", "deepened", "--copies", 2, "--state-dir", tmp_path, "--out", out)[0] == 0
    config = ServiceConfig(budget_policy="fixed", max_budget=8, drafter="specblock", state_dir=tmp_path)
    both = [gpu_assembled(config, FULL, model) for model in (None, out)]
    assert [len(one.loaded.kv_shape.layers) for one in both] == [30, 60]
    assert [one.loaded.in_blocks for one in both] == [library.variant() is not None] * 2
    assert_same(*(runs_of(one, 8) for one in both))
