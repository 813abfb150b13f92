"""Models with recurrent layers from GGUF files: each weight at its place, in blocks or not; and what is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kernels.experts import QuantisedStack
from kernels.layers import Weight, dense
from service.engine.gguf_config import config_of
from service.engine.gguf_file import load_gguf
from service.engine.gguf_reader import open_gguf
from service.engine.gguf_recurrent import RECURRENT
from service.engine.modules import weights_of
from service.errors import StartupError
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made
from tests.conformance.gguf_writer import Contents, contents
from tests.conformance.judges import loaded
from tests.conformance.measures import tokenizer_keys
from tests.service.engine.harness import tiny_target

FILES = [one for one in CHECKPOINTS if one.gguf in RECURRENT]
QWEN35 = next(one for one in FILES if one.gguf == "qwen35")


def file_of(checkpoint: Checkpoint, kind: Kind) -> Contents:
    return contents(made(checkpoint), checkpoint.gguf, kind, tokenizer_keys(checkpoint.gguf))


def dense_of(weight: Weight | QuantisedStack) -> Tensor:
    return weight.dense() if isinstance(weight, QuantisedStack) else dense(weight)


def same(one: Tensor, other: Tensor) -> bool:
    """But for the logarithm of an exponential, and for 1 added and taken away."""
    return torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpoint", [one for one in FILES if one.gguf != "qwen3next"], ids=str)
def test_weights_are_those_of_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = open_gguf(file_of(checkpoint, Kind.F32).write(tmp_path / "a.gguf"))
    found = load_gguf(file, config_of(file), torch.float32, "eager", in_blocks=True).state_dict()
    expected = made(checkpoint).state_dict()
    assert found.keys() == expected.keys()
    assert all(same(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
def test_sorted_rows_and_columns_stay_in_blocks(kind: Kind, tmp_path: Path) -> None:
    path = file_of(QWEN35, kind).write(tmp_path / "a.gguf")
    ours, theirs = (weights_of(loaded(path, torch.float32, in_blocks=kept).model) for kept in (True, False))
    for name, value in theirs.items():
        assert isinstance(value, Tensor)
        assert same(dense_of(ours[name]), value), name


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("blk.0.ssm_a", lambda data: -data, "decays are not negative"),
        ("blk.0.attn_qkv.weight", lambda data: data[:-8], "'blk.0.attn_qkv.weight' cannot be used"),
        ("blk.1.ssm_alpha.weight", lambda data: np.concatenate((data, data)), "'blk.1.ssm_alpha.weight' cannot be"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, change: Callable[[np.ndarray], np.ndarray], complaint: str, tmp_path: Path
) -> None:
    file = file_of(QWEN35, Kind.F32)
    data, kind = file.tensors[name]
    path = Contents(file.keys, {**file.tensors, name: (change(data), kind)}).write(tmp_path / "a.gguf")
    with pytest.raises(StartupError, match=complaint):
        loaded(path, torch.float32)


def test_a_recurrent_layer_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    model = loaded(file_of(QWEN35, Kind.F32).write(tmp_path / "a.gguf"), torch.float32)
    model.model.get_submodule("model.layers.1.linear_attn").activation = "gelu"  # type: ignore[assignment]
    with pytest.raises(StartupError, match="layer 1 is not a standard layer; a model with recurrent layers runs by"):
        tiny_target(model)
