"""GGUF files as they are: what is read is what the `gguf` package reads, and damaged files are refused by name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader, dequantize
from transformers import LlamaConfig, PreTrainedModel

from benchmarks.gguf_shapes import Shape, random_blocks, write_file
from kernels.cpu import library
from kernels.rows import ExtendRows
from service.engine import gguf_blocks
from service.engine.decoder import FusedDecoder
from service.engine.gguf_file import load_gguf
from service.engine.gguf_reader import open_gguf
from service.engine.kv_pool import KVPool
from service.engine.measuring import Trial, check
from service.engine.modules import ATTENTION_NAME, QuantisedEmbedding, QuantisedLinear
from service.engine.target import Target
from service.engine.weights import kv_shape
from service.errors import StartupError
from tests.kernels.conftest import BUILDS, of_build

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
SHAPE = Shape(hidden=256, layers=2, heads=4, kv_heads=2, dim=64, feed_forward=512, vocab=96)


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.dim,
        intermediate_size=SHAPE.feed_forward,
        tie_word_embeddings=True,
    )


def written(path: Path, kinds: dict[str, Kind] | None = None) -> Path:
    chosen = kinds or {}
    matrices = [one._replace(kind=chosen.get(one.name, one.kind)) for one in SHAPE.matrices("q4_k_m")]
    write_file(path, SHAPE, matrices)
    return path


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Scales of K types are products, which are kept in float16; those of other types are in the file in this type."""
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))


def loaded(file: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> PreTrainedModel:
    return load_gguf(open_gguf(file), config(), dtype, attention, in_blocks=True)


@pytest.mark.parametrize("kind", list(gguf_blocks.FORMATS), ids=lambda kind: kind.name)
def test_blocks_are_worth_what_the_gguf_package_says(kind: Kind) -> None:
    data = random_blocks(np.random.default_rng(1), 40, 512, kind)
    weight, name = gguf_blocks.kept(data, kind, torch.float32)
    expected = torch.from_numpy(dequantize(data, kind))
    assert (weight.shape, name) == ((40, 512), kind.name)
    if name.endswith("_K"):
        assert_close(weight.dense(), expected)
    else:
        assert torch.equal(weight.dense(), expected)


def test_other_types_are_kept_in_8_bits() -> None:
    data = np.random.default_rng(1).integers(0, 255, (32, 84), dtype=np.uint8)
    data[:, 80:84] = np.array([0.01, 0.02], dtype=np.float16).view(np.uint8)
    weight, name = gguf_blocks.kept(data, Kind.Q2_K, torch.float32)
    expected = torch.from_numpy(dequantize(data, Kind.Q2_K))
    assert name == "Q2_K in 8 bits"
    torch.testing.assert_close(weight.dense(), expected, rtol=0, atol=float(expected.abs().max()) / 127)


def test_a_model_is_that_of_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "a.gguf")
    model = loaded(file)
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    layer = model.get_submodule("model.layers.1")
    down = layer.get_submodule("mlp.down_proj")
    assert isinstance(down, QuantisedLinear)
    tensor = tensors["blk.1.ffn_down.weight"]
    assert_close(down.weight.dense(), torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, QuantisedEmbedding)
    assert isinstance(head, QuantisedLinear)
    assert head.weight is embedding.weight
    logits = model(torch.arange(6)[None]).logits
    assert logits.shape == (1, 6, SHAPE.vocab)
    assert logits.isfinite().all()


def test_heads_of_a_llama_are_put_back_in_order(tmp_path: Path) -> None:
    """llama.cpp keeps the two halves of a head's rotary pairs beside each other."""
    file = written(tmp_path / "a.gguf")
    tensor = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.0.attn_k.weight")
    whole = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)).view(SHAPE.kv_heads, SHAPE.dim // 2, 2, -1)
    key = loaded(file).get_submodule("model.layers.0.self_attn.k_proj")
    assert isinstance(key, QuantisedLinear)
    expected = whole.transpose(1, 2).reshape(SHAPE.kv_heads * SHAPE.dim, -1)
    assert_close(key.weight.dense(), expected)


def test_a_file_without_some_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_file(file, SHAPE, [one for one in SHAPE.matrices("q8_0") if one.name != "blk.1.ffn_up.weight"])
    with pytest.raises(StartupError, match=r"weights are missing for blk\.1\.ffn_up\.weight"):
        loaded(file)


def test_every_build_for_x86_computes_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of unlike processors go on with each other's texts."""
    file, found = written(tmp_path / "a.gguf"), list[torch.Tensor]()
    for build in [name for name in BUILDS if name != "neon"]:
        for _ in of_build(build, monkeypatch):
            model = loaded(file, torch.bfloat16, ATTENTION_NAME)
            target = Target(model, KVPool(kv_shape(model), 600, model.device))
            trial = Trial(target, sequences=1, max_length=300)
            trial.prefill(0, trial.random_tokens(200), chunk=64)
            _, logits = trial.run([ExtendRows(0, 200, trial.random_tokens(20), completes=True)])
            found.append(logits)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_rows_of_such_a_model_do_not_depend_on_their_company(tmp_path: Path) -> None:
    model = loaded(written(tmp_path / "a.gguf"), torch.bfloat16, ATTENTION_NAME)
    target = Target(model, KVPool(kv_shape(model), 600, model.device))
    assert isinstance(target._layers, FusedDecoder)  # our own ops run, not the model's modules
    assert check(target) == "exact"
