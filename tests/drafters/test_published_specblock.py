"""SpecBlock in its authors' form: what it says, by plain torch on the same weights; written and read again; refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import folders as published
from drafters.coupling import TreeNoise
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.heads import propose, rank_features
from drafters.network.model import SpecBlock
from drafters.network.pool import EntryPool, EntryState
from drafters.network.served import ServingNetwork
from drafters.network.serving import BlockForward
from drafters.protocol import DraftingSizes
from kernels.lattice import Picked, StartNodes
from service.engine.weights import LoadedModel
from tests.published_forms import HIDDEN, deep_target
from tests.published_specblock import BLOCK, CUT, DRAFT_VOCAB, Block, says, specblock
from tests.tiny_models import load, stock

TEXT = torch.randint(300, (12,), generator=torch.Generator().manual_seed(1))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@torch.no_grad()
def spoken(model: SpecBlock, loaded: LoadedModel, features: Tensor, tokens: Tensor, further: Tensor) -> list[Block]:
    """The same two blocks while serving. # features [count, 3 * hidden], tokens [count] after them, further []"""
    count, network = len(features), ServingNetwork(model.config, weights_of(model))
    pool = EntryPool(network, count + 1, sequences=1, live=2 * BLOCK)
    state = EntryState(DraftingSizes(max_sequences=1, max_length=64, max_nodes=0), pool, 3 * HIDDEN, torch.float32)
    rows, slots = torch.tensor([0]), torch.arange(count)[None] + 1
    state.wait(rows, torch.tensor([0]), torch.tensor([count]), slots, features[None], tokens[None])
    table = loaded.parts.embedding
    forward = BlockForward(network, lambda ids: table[ids], pool, state)
    first, nodes = forward.first(rows, state.take(rows, count))
    at = torch.tensor([[CUT]])
    picked = Picked(StartNodes(at, at, torch.ones(1, 1)), further.view(1, 1), torch.zeros_like(at), at - 1)
    later, _ = forward.next(first, picked, nodes, torch.tensor([count]))
    noise = TreeNoise(torch.zeros(1), torch.zeros(1, 0, DRAFT_VOCAB))
    depths = torch.arange(1, BLOCK + 1).view(1, 1, BLOCK)
    found = []
    for states in (first[..., :HIDDEN].contiguous(), later[..., :HIDDEN].contiguous()):
        logits = propose(network, states, depths, noise).logits
        classes = network.rank_logits(states, rank_features(logits, network.traits.rank_head.scores)[0])
        found.append(Block(logits[0, 0], classes[0, 0]))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["LlamaForCausalLMSpecBlockShift"], "rope_theta": 500_000.0, "head_dim": 24},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ],
    ids=["Llama", "Qwen3", "scaled"],
)
def test_it_says_what_its_authors_layers_say(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Logits and rank classes, behind a text and behind its own state."""
    target, folder = deep_target(tmp_path / "target"), specblock(tmp_path / "drafter", **changes)
    loaded, oracle = load(target), stock(target)
    assert published.kind_of(folder) == "specblock"
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    assert model.config.tap_layers == (1, 3, 4)
    received = oracle(TEXT[None], output_hidden_states=True).hidden_states  # of layer n it is the n-th
    features = torch.cat([received[layer + 1][0] for layer in model.config.tap_layers], dim=-1)
    table = loaded.parts.embedding
    for count in (1, 4, len(TEXT) - 1):
        after, further = TEXT[1 : count + 1], torch.tensor(250)
        expected = says(folder, features[:count], table[after], table[further])
        found = spoken(model, loaded, features[:count], after, further)
        for one, other in zip(found, expected, strict=True):
            assert (one.logits - other.logits).abs().max() < 1e-4
            assert (one.ranks - other.ranks).abs().max() < 1e-4


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    folder = specblock(tmp_path / "drafter")
    described = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"hidden_size": 64}, "its hidden_size is 64, the target's is 48"),
        ({"vocab_size": 300}, "its vocab_size is 300, the target's is 320"),
        ({"rank_classes": 5}, "its rank_classes is 5, only 4 is supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "its rope_scaling is 'linear'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "its config sets eagle_config"),
        ({"draft_vocab_size": 41}, "its d2t must list 41 tokens, and lists 40"),
        ({"diffspec_draft_token_num": 5}, "input_layer.position_queries has shape"),
        ({"num_hidden_layers": 3}, "parameters missing"),
        ({"intermediate_size": 80}, r"mlp\.down_proj\.weight has shape"),
        ({"architectures": ["LlamaForCausalLMSpecBlock2"]}, "names LlamaForCausalLMSpecBlock2, which is none of"),
    ):
        (folder / "config.json").write_text(json.dumps(described | changes))
        with pytest.raises(DrafterError, match=message):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    for missing in ("rank_classes", "draft_vocab_size", "diffspec_draft_token_num"):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in described.items() if k != missing}))
        with pytest.raises(DrafterError, match=missing):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    for name in ("rank_head.0.weight", "rank_head.2.weight", "shift_proj.0.weight", "layers.1.mlp.up_proj.weight"):
        save_file({key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors")
        with pytest.raises(DrafterError, match=name.replace(".", r"\.")):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    for name, shape in (("rank_head.2.weight", (5, 256)), ("lm_head.weight", (DRAFT_VOCAB, 40))):
        save_file(tensors | {name: torch.zeros(shape)}, folder / "model.safetensors")
        with pytest.raises(DrafterError, match=rf"{name} has shape"):
            published.load(folder, parts, dtype=torch.float32, device="cpu")
    save_file(tensors | {"input_layer.embed_tokens.weight": -parts.embedding}, folder / "model.safetensors")
    with pytest.raises(DrafterError, match=r"its input_layer\.embed_tokens\.weight is not the target's"):
        published.load(folder, parts, dtype=torch.float32, device="cpu")
