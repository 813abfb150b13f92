"""Models with experts from GGUF files: each weight at its place, in blocks or not, and rows on their own."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kernels.cpu import library
from service.engine.gguf_config import config_of
from service.engine.gguf_file import load_gguf
from service.engine.gguf_reader import open_gguf
from service.engine.measuring import check
from service.engine.modules import QuantisedExperts, expert_weights, is_experts, num_bytes, weights_of
from service.errors import StartupError
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made
from tests.conformance.gguf_writer import Contents, contents
from tests.conformance.judges import loaded
from tests.conformance.measures import tokenizer_keys
from tests.service.engine.harness import tiny_target

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
ARCHITECTURES = ("llama", "qwen3moe", "olmoe", "glm4moe", "gpt-oss", "gemma4")
SPARSE = {one.gguf: one for one in CHECKPOINTS if "experts" in one.options and one.gguf in ARCHITECTURES}


def file_of(checkpoint: Checkpoint, kind: Kind) -> Contents:
    return contents(made(checkpoint), checkpoint.gguf, kind, tokenizer_keys(checkpoint.gguf))


@pytest.mark.parametrize("checkpoint", SPARSE.values(), ids=str)
def test_weights_are_those_of_the_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    file = open_gguf(file_of(checkpoint, Kind.F32).write(tmp_path / "a.gguf"))
    found = load_gguf(file, config_of(file), torch.float32, "eager", in_blocks=True).state_dict()
    expected = made(checkpoint).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("checkpoint", SPARSE.values(), ids=str)
def test_experts_stay_in_blocks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = loaded(file_of(checkpoint, Kind.Q8_0).write(tmp_path / "a.gguf"), torch.bfloat16, in_blocks=True)
    dense = dict(made(checkpoint).named_modules())
    kept = {name: module for name, module in model.model.named_modules() if is_experts(module)}
    assert kept
    for name, module in kept.items():
        assert isinstance(module, QuantisedExperts)
        for ours, theirs in zip(expert_weights(module)[:2], expert_weights(dense[name])[:2], strict=True):
            assert not isinstance(ours, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            torch.testing.assert_close(
                ours.dense(), theirs.detach(), rtol=0, atol=float(theirs.detach().abs().max()) / 127
            )
    assert model.read_bytes < sum(map(num_bytes, weights_of(made(checkpoint)).values())) / 3
    assert (model.in_blocks, model.has_experts, model.dtype_name) == (True, True, "gguf+float32")
    assert check(tiny_target(model, num_slots=600)) == "exact"


def test_gate_and_up_rows_may_have_two_types(tmp_path: Path) -> None:
    checkpoint = SPARSE["olmoe"]
    file, other = file_of(checkpoint, Kind.Q8_0), file_of(checkpoint, Kind.Q4_0)
    mixed = {name: other.tensors[name] for name in file.tensors if "ffn_up_exps" in name}
    written = Contents(file.keys, file.tensors | mixed).write(tmp_path / "a.gguf")
    one, two = (loaded(path, torch.bfloat16, in_blocks=True) for path in (written, file.write(tmp_path / "b.gguf")))
    assert one.fingerprint != two.fingerprint
    stacks = [expert_weights(model.model.get_submodule("model.layers.0.mlp.experts"))[0] for model in (one, two)]
    gates = [stack.dense()[:, : stack.shape[1] // 2] for stack in stacks if not isinstance(stack, torch.Tensor)]
    assert torch.equal(*gates)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda tensors: tensors.pop("blk.0.ffn_up_exps.weight"),
            r"layer 0 .*ffn_up_exps\.weight is missing",
        ),
        (
            lambda tensors: tensors.update({"blk.0.ffn_up_exps.weight": tensors["blk.0.ffn_down_exps.weight"]}),
            r"blk\.0\.ffn_up_exps\.weight .* another shape than the metadata's \[16, 128, 256\]",
        ),
        (
            lambda tensors: tensors.update({"blk.7.ffn_up_exps.weight": tensors["blk.0.ffn_up_exps.weight"]}),
            r"'blk\.7\.ffn_up_exps\.weight' cannot be used: this model has no such weight",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: object, complaint: str, tmp_path: Path) -> None:
    file = file_of(SPARSE["olmoe"], Kind.Q8_0)
    assert callable(change)
    change(file.tensors)
    with pytest.raises(StartupError, match=complaint):
        loaded(file.write(tmp_path / "a.gguf"), torch.bfloat16, in_blocks=True)


def test_the_drafter_behind_the_last_layer_is_not_read(tmp_path: Path) -> None:
    file = file_of(SPARSE["glm4moe"], Kind.Q8_0)
    layers = int(str(file.keys["glm4moe.block_count"]))
    keys = file.keys | {"glm4moe.block_count": layers + 1, "glm4moe.nextn_predict_layers": 1}
    more = {f"blk.{layers}.nextn.enorm.weight": file.tensors["output_norm.weight"]}
    model = loaded(Contents(keys, file.tensors | more).write(tmp_path / "a.gguf"), torch.bfloat16, in_blocks=True)
    assert model.model.config.num_hidden_layers == layers


def test_keys_and_values_of_layers_that_read_those_of_others_are_not_read(tmp_path: Path) -> None:
    file = file_of(next(one for one in CHECKPOINTS if one.kind == "per-layer embeddings"), Kind.Q8_0)
    more = {f"blk.5.attn_{name}.weight": file.tensors[f"blk.2.attn_{name}.weight"] for name in ("k", "v", "k_norm")}
    files = Contents(file.keys, file.tensors | more).write(tmp_path / "a.gguf"), file.write(tmp_path / "b.gguf")
    one, two = (loaded(path, torch.float32).fingerprint for path in files)
    assert one == two
