"""Published forms: their drafters say here what plain torch says of the same weights, and what is none is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import folders as published
from drafters.calibration import class_logits
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.model import SpecBlock
from drafters.network.pool import EntryPool, EntryState
from drafters.network.served import ServingNetwork
from drafters.network.serving import forward_of
from drafters.protocol import DraftingSizes
from kernels.lattice import Picked, StartNodes
from tests.published_forms import (
    DFLASH_BLOCK,
    DFLASH_TAPS,
    MASK_TOKEN,
    VOCAB,
    deep_target,
    dflash,
    dflash_says,
    dflash_target,
    eagle3,
    eagle3_says,
    mimo,
    mimo_says,
    read_as_qwen2,
)
from tests.tiny_models import load, stock

MORE = torch.tensor([7, 250, 31])
TEXT = torch.randint(300, (12,), generator=torch.Generator().manual_seed(1))


def network_of(model: SpecBlock) -> ServingNetwork:
    return ServingNetwork(model.config, weights_of(model))


@torch.no_grad()
def spoken(
    model: SpecBlock, table: Tensor, features: Tensor, tokens: Tensor, count: int, more: Tensor | None = None
) -> Tensor:
    """Logits of a first block behind so many committed positions, then of those at some further tokens, each behind the
    one before. # table [vocab, hidden], more [steps] int64 -> [(1 + steps) * block, vocab]"""
    network, slots = network_of(model), torch.arange(count)[None] + 1
    width = features.shape[-1]
    pool = EntryPool(network, count + 1, sequences=1, live=8)
    state = EntryState(DraftingSizes(max_sequences=1, max_length=64, max_nodes=0), pool, width, torch.float32)
    rows, counts = torch.tensor([0]), torch.tensor([count])
    state.wait(rows, torch.tensor([0]), counts, slots, features[None, :count], tokens[None, 1 : count + 1])
    forward = forward_of(network, lambda ids: table[ids], pool, state)
    states, nodes = forward.first(rows, state.take(rows, count))
    logits = [network.head(model.heads_and_context(states)[0].contiguous())]
    for depth, token in enumerate([] if more is None else more, start=1):
        at = torch.tensor([[depth]])
        origin = StartNodes(at, at, torch.ones(1, 1))
        picked = Picked(origin, token.view(1, 1), start=torch.zeros_like(at), position=torch.zeros_like(at))
        states, nodes = forward.next(states, picked, nodes, torch.tensor([count]))
        logits.append(network.head(model.heads_and_context(states)[0].contiguous()))
    return torch.cat(logits, dim=2)[0, 0]


@torch.no_grad()
def tapped(model: object, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Outputs of a stock model's layers. # -> [length, taps * hidden]"""
    outputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, output, at=at: outputs.update({at: output if isinstance(output, Tensor) else output[0]})
        )
        for at, layer in enumerate(model.model.layers)  # type: ignore[attr-defined]
    ]
    model(tokens[None])  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    return torch.cat([outputs[layer].view(len(tokens), -1) for layer in layers], dim=-1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_mimo_target_has_a_drafter_that_says_what_its_module_says(tmp_path: Path, tied: bool) -> None:
    folder = mimo(tmp_path / "mimo", tied=tied)
    loaded, stock = load(folder), read_as_qwen2(folder, tmp_path / "qwen2")
    assert loaded.model.config.model_type == "qwen2"
    assert published.kind_of(folder) == "mtp"
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    assert model.config.tap_layers == (2,)
    expected = mimo_says(folder, stock, TEXT)
    features = tapped(stock, TEXT, model.config.tap_layers)
    for count in (1, 4, len(TEXT) - 1):
        logits = spoken(model, loaded.parts.embedding, features, TEXT, count)[0]
        assert (logits - expected[count - 1]).abs().max() < 1e-4


EAGLE3_FORMS: dict[str, dict[str, Any]] = {
    "EAGLE": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True},
    "speculators": {"nested": True, "norm_before_residual": True},
    "speculators of three layers": {"nested": True, "layers": 3, "norm_before_residual": True, "norm_output": True},
}


@pytest.mark.parametrize("form", EAGLE3_FORMS)
def test_an_eagle3_drafter_says_what_its_authors_layers_say(tmp_path: Path, form: str) -> None:
    """Behind a text, and behind its own states."""
    flags = EAGLE3_FORMS[form]
    target, folder = deep_target(tmp_path / "target"), eagle3(tmp_path / "drafter", **flags)
    loaded, oracle = load(target), stock(target)
    assert published.kind_of(folder) == "eagle3"
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    layers = (1, 3, 6) if flags.get("nested") else (2, 4, 5)  # of which the inputs are tapped
    assert model.config.tap_layers == tuple(layer - 1 for layer in layers)
    received = oracle(TEXT[None], output_hidden_states=True).hidden_states  # of layer n it is the n-th
    features = torch.cat([received[layer][0] for layer in layers], dim=-1)
    table = loaded.parts.embedding
    for count in (1, 4, len(TEXT) - 1):
        expected = eagle3_says(folder, features[:count], table[TEXT[1 : count + 1]], table[MORE])
        found = spoken(model, loaded.parts.embedding, features, TEXT, count, MORE)
        assert (found - expected).abs().max() < 1e-4


DFLASH_FORMS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "JetSpec": {"causal": True, "layers": 3},
    "speculators": {"nested": True},
    "speculators with an own head": {"nested": True, "own": True, "sample_from_anchor": True},
}


@pytest.mark.parametrize("form", DFLASH_FORMS)
def test_a_dflash_drafter_says_what_its_authors_layers_say(tmp_path: Path, form: str) -> None:
    flags = DFLASH_FORMS[form]
    target, folder = dflash_target(tmp_path / "target"), dflash(tmp_path / "drafter", **flags)
    loaded, oracle, causal = load(target), stock(target), "causal" in flags
    assert published.kind_of(folder) == ("jetspec" if causal else "dflash")
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    assert model.config.tap_layers == DFLASH_TAPS
    silent = 0 if "sample_from_anchor" in flags else 1
    assert model.config.block_size == DFLASH_BLOCK - silent
    received = oracle(TEXT[None], output_hidden_states=True).hidden_states  # of layer n it is the n-th
    features = torch.cat([received[tap + 1][0] for tap in DFLASH_TAPS], dim=-1)
    table = loaded.parts.embedding
    head = load_file(folder / "model.safetensors")["lm_head.weight"] if flags.get("own") else table
    for count in (1, 4, len(TEXT) - 1):
        rows = torch.cat([table[TEXT[count]][None], table[MASK_TOKEN].expand(DFLASH_BLOCK - 1, -1)])
        expected = dflash_says(folder, features[:count], rows, head, causal=causal)[silent:]
        found = spoken(model, loaded.parts.embedding, features, TEXT, count)
        assert (found - expected).abs().max() < 1e-4


def test_what_changes_dflash_is_refused_by_name(tmp_path: Path) -> None:
    parts = load(dflash_target(tmp_path / "target")).parts

    def refused(message: str, **flags: Any) -> None:
        top = flags.pop("top", {})
        folder = dflash(tmp_path / "drafter", **flags)
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | top))
        with pytest.raises(DrafterError, match=message):
            published.load(folder, parts, dtype=torch.float32, device="cpu")

    for key in ("projector_type", "selector_heads", "conv_kernel", "pure_draft_prefix_len", "shift_label", "use_swa"):
        refused(f"its config sets {key}, which is not supported", **{key: 1})
    sliding = ["sliding_attention", "full_attention"]
    refused("its config sets layer_types other than full", top={"layer_types": sliding, "sliding_window": 9})
    refused("its config has no mask_token_id", mask_token_id=None)
    refused("mask_token 320 is not in the target's vocabulary", mask_token_id=VOCAB)
    refused("it taps layers 1, 8, and the target has 8", target_layer_ids=[1, 8])
    refused("it taps layers 0, 3, and the target has 8", nested=True, aux_hidden_state_layer_ids=[0, 3])
    refused("its config sets is_causal, which is not supported", top={"is_causal": True})
    refused("its hidden_size is 64, the target's is 48", top={"hidden_size": 64})
    gemma = replace(parts, config={**parts.config, "model_type": "gemma2"})
    with pytest.raises(DrafterError, match="its target scales embeddings"):
        published.load(dflash(tmp_path / "drafter"), gemma, dtype=torch.float32, device="cpu")
    parts = load(dflash_target(tmp_path / "untied", tied=False)).parts
    refused("it has no head of its own, and the target's head is repacked")


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    folder = eagle3(tmp_path / "drafter", torn="midlayer.mlp.up_proj.weight")
    with pytest.raises(DrafterError, match=r"parameters missing: \['decoder.layers.0.mlp.up_proj.weight'\]"):
        published.load(folder, parts, dtype=torch.float32, device="cpu")
    described = json.loads((eagle3(folder) / "config.json").read_text())
    for changes, message in (
        ({"hidden_size": 64}, "its hidden_size is 64, the target's is 48"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, "it taps layers 2, 5, 9, and the target has 8"),
        ({"target_hidden_size": 64}, "its config sets target_hidden_size, which is not supported"),
        ({"architectures": ["LlamaEagle4"]}, "names LlamaEagle4, which is none of dflash, eagle3, mtp"),
        ({"speculators_model_type": "peagle"}, "kind 'parallel' is a plug-in of benchmarks/baselines"),
        ({"medusa_num_heads": 3, "architectures": ["Medusa"]}, "kind 'medusa' is a plug-in of benchmarks/baselines"),
        ({"speculators_model_type": "dspark"}, "names dspark, which is none of dflash, eagle3, mtp"),
        ({"model_type": "mixtral"}, "cannot have layers of kind 'mixtral'"),
    ):
        (folder / "config.json").write_text(json.dumps(described | changes))
        with pytest.raises(DrafterError, match=message):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": -parts.embedding}, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=r"its embed_tokens\.weight is not the target's"):
        published.load(folder, parts, dtype=torch.float32, device="cpu")
    save_file(tensors | {"embed_tokens.weight": parts.embedding}, folder / "model.safetensors")
    assert published.load(folder, parts, dtype=torch.float32, device="cpu").config.kind == "eagle3"
    (folder / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"holds no \.safetensors or \.bin file with its weights"):
        published.load(folder, parts, dtype=torch.float32, device="cpu")


def test_pickles_of_tensors_are_read_and_others_are_not(tmp_path: Path) -> None:
    """What a pickle would execute is not executed."""
    parts = load(deep_target(tmp_path / "target")).parts
    folder, ran = eagle3(tmp_path / "drafter"), tmp_path / "ran"
    tensors = load_file(folder / "model.safetensors")
    expected = weights_of(published.load(folder, parts, dtype=torch.float32, device="cpu"))
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    found = weights_of(published.load(folder, parts, dtype=torch.float32, device="cpu"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    for content in (tensors | {"norm.weight": Runs(ran)}, [1, 2]):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(DrafterError, match="holds more than tensors"):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    assert not ran.exists()


class Runs:
    """Pickled, it creates a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


@pytest.mark.parametrize(
    ("distances", "message"),
    [
        ([0] * 39, "its d2t must list 40 tokens, and lists 39"),
        ([0], "its d2t must list 40 tokens, and lists 1"),
        (None, "its d2t must list 40 tokens, and lists 0"),
        ([300] * 40, "its d2t names tokens that the target does not have, or one twice"),
        ([0, -1] + [0] * 38, "its d2t names tokens that the target does not have, or one twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(tmp_path: Path, distances: list[int] | None, message: str) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    folder = eagle3(tmp_path / "drafter", torn="d2t")
    tensors = load_file(folder / "model.safetensors")
    given = {} if distances is None else {"d2t": torch.tensor(distances)}
    save_file(tensors | given, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=message):
        published.load(folder, parts, dtype=torch.float32, device="cpu")


def test_an_untrained_rank_head_says_what_the_draft_says() -> None:
    chances = torch.tensor([0.5, 0.1, 0.1, 0.05, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01])
    expected = torch.tensor([0.5, 0.25, 0.1, 0.15])
    assert torch.allclose(class_logits(chances.log()).softmax(-1), expected, atol=1e-5)
