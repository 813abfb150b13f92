"""SpecBlock in its authors' form: what it says, by plain torch on the same weights; written and read again; refused."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from drafters.coupling import TreeNoise
from drafters.protocol import DraftingSizes
from drafters.published import folders as published
from drafters.published.specblock import SPECBLOCK
from drafters.specblock.checkpoint import DrafterError, weights_of
from drafters.specblock.config import config_from
from drafters.specblock.heads import propose
from drafters.specblock.model import SpecBlock
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import EntryPool, EntryState
from drafters.specblock.serving import BlockForward
from kernels.lattice import Picked, StartNodes
from service.engine.weights import LoadedModel
from tests.published_forms import EPSILON, HIDDEN, VOCAB, deep_target, drawn, layer_shapes, normed, written
from tests.tiny_models import load, stock

BLOCK, DRAFT_VOCAB, CUT, HEADS, DIM = 4, 40, 3, 4, 12
TEXT = torch.randint(300, (12,), generator=torch.Generator().manual_seed(1))
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def specblock(folder: Path, **changes: Any) -> Path:
    shapes: dict[str, tuple[int, ...]] = {
        "input_layer.condition_proj.weight": (HIDDEN, 3 * HIDDEN),
        "input_layer.position_queries.weight": (BLOCK, HIDDEN),
        "input_layer.fuse.weight": (HIDDEN, 3 * HIDDEN),
        **{f"input_layer.{part}_norm.weight": (HIDDEN,) for part in ("condition", "token", "query")},
        **layer_shapes("layers.0.", reads=HIDDEN, biases=False),
        **layer_shapes("layers.1.", reads=HIDDEN, biases=False),
        "shift_proj.0.weight": (HIDDEN, 2 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "rank_head.0.weight": (256, HIDDEN + 15),
        "rank_head.2.weight": (4, 256),
    }
    tensors = drawn(shapes, seed=5)
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:DRAFT_VOCAB].sort().values
    tensors |= {"d2t": tokens - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), tokens)}
    config = {
        "architectures": ["LlamaForCausalLMSpecBlock"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPSILON,
        "draft_vocab_size": DRAFT_VOCAB,
        "diffspec_draft_token_num": BLOCK,
        "rank_classes": 4,
    }
    return written(folder, tensors, config | changes)


class Block(NamedTuple):
    logits: Tensor  # [block, draft vocab]
    ranks: Tensor  # [block, 4]


@torch.no_grad()
def says(folder: Path, features: Tensor, embedded: Tensor, further: Tensor) -> list[Block]:
    """The block behind a text, and one that starts at its third entry: their positions are the same.
    # features [length, 3 * hidden], embedded [length, hidden] of the tokens after, further [hidden]"""
    own, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    length = len(features)
    anchor = torch.arange(length).repeat_interleave(BLOCK)
    entry = torch.arange(BLOCK).repeat(length)
    seen = (anchor[None] < anchor[:, None]) | ((anchor[None] == anchor[:, None]) & (entry[None] <= entry[:, None]))
    stream = fused(own, features @ own["input_layer.condition_proj.weight"].T, embedded)
    states = raw_states(own, config, stream, anchor + 1 + entry, seen)
    start = states[len(states) - BLOCK + CUT - 1]
    both = torch.cat([stream, fused(own, start[None], further[None])])
    path = (anchor < length - 1) | (entry < CUT)
    grown = torch.cat(
        [
            torch.cat([seen, torch.zeros(len(seen), BLOCK, dtype=torch.bool)], dim=1),
            torch.cat([path.expand(BLOCK, -1), torch.ones(BLOCK, BLOCK).tril().bool()], dim=1),
        ]
    )
    positions = torch.cat([anchor + 1 + entry, length + torch.arange(BLOCK)])
    later = raw_states(own, config, both, positions, grown)
    return [heads(own, block[-BLOCK:]) for block in (states, later)]


def fused(own: dict[str, Tensor], condition: Tensor, token: Tensor) -> Tensor:
    """# condition, token [anchors, hidden] -> [anchors * block, hidden]"""
    parts = {"condition": condition[:, None], "token": token[:, None]}
    parts["query"] = own["input_layer.position_queries.weight"][None]
    whole = (len(condition), BLOCK, HIDDEN)
    wide = [normed(part, own[f"input_layer.{name}_norm.weight"]).expand(whole) for name, part in parts.items()]
    return (torch.cat(wide, dim=-1) @ own["input_layer.fuse.weight"].T).flatten(0, 1)


def raw_states(
    own: dict[str, Tensor], config: dict[str, Any], hidden: Tensor, positions: Tensor, seen: Tensor
) -> Tensor:
    """# hidden [rows, hidden], positions [rows], seen [rows, rows] -> like hidden"""
    for number in range(2):
        layer = {name.removeprefix(f"layers.{number}."): value for name, value in own.items()}
        if number:
            blocks = hidden.view(-1, BLOCK, HIDDEN)
            before = torch.cat([blocks[:, :1], blocks[:, :-1]], dim=1)
            hidden = torch.cat([blocks, before], dim=-1).flatten(0, 1) @ own["shift_proj.0.weight"].T
        read = normed(hidden, layer["input_layernorm.weight"])
        query, key, value = (
            (read @ layer[f"self_attn.{name}_proj.weight"].T).view(len(read), -1, DIM).transpose(0, 1) for name in "qkv"
        )
        query, key = turned(query, positions, config), turned(key, positions, config)
        key, value = key.repeat_interleave(2, dim=0), value.repeat_interleave(2, dim=0)
        scores = (query @ key.transpose(1, 2) / DIM**0.5).masked_fill(~seen, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ layer["self_attn.o_proj.weight"].T
        x = normed(hidden, layer["post_attention_layernorm.weight"])
        gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return hidden


def turned(x: Tensor, positions: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotate by position, frequencies scaled as Llama 3 does where the config says so. # x [heads, rows, dim]"""
    frequencies = config.get("rope_theta", 10_000.0) ** (-torch.arange(0, DIM, 2) / DIM)
    scaling = config.get("rope_scaling")
    if scaling:
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        share = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (share + (1 - share) / scaling["factor"])
    angles = (positions[:, None] * frequencies).repeat(1, 2)
    half = DIM // 2
    return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * angles.sin()


def heads(own: dict[str, Tensor], raw: Tensor) -> Block:
    """The rank head reads features of the 20 likeliest logits. # raw [block, hidden]"""
    states = normed(raw, own["norm.weight"])
    logits = states @ own["lm_head.weight"].T
    logs = logits.sort(descending=True).values[:, :20].log_softmax(-1)
    gaps = logs[:, :1] - logs[:, [1, 2, 4]]
    entropy = -(logs.exp() * logs).sum(-1, keepdim=True)
    read = torch.cat([states, logs[:, :10], gaps, logs[:, :1].exp(), entropy], dim=-1)
    return Block(logits, silu(read @ own["rank_head.0.weight"].T) @ own["rank_head.2.weight"].T)


@torch.no_grad()
def said(model: SpecBlock, loaded: LoadedModel, features: Tensor, tokens: Tensor, further: Tensor) -> list[Block]:
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
    proposals = [propose(network, states[..., :HIDDEN].contiguous(), depths, noise) for states in (first, later)]
    return [Block(proposal.logits[0, 0], proposal.chances.classes[0, 0]) for proposal in proposals]


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
        found = said(model, loaded, features[:count], after, further)
        for one, other in zip(found, expected, strict=True):
            assert (one.logits - other.logits).abs().max() < 1e-4
            assert (one.ranks - other.ranks).abs().max() < 1e-4


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}], ids=["plain", "scaled"])
def test_what_is_written_is_what_was_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    folder = specblock(tmp_path / "read", **changes)
    model = published.load(folder, parts, dtype=torch.float32, device="cpu")
    assert SPECBLOCK.write is not None
    described, tensors = SPECBLOCK.write(model.config, weights_of(model), "a target")
    before = load_file(folder / "model.safetensors")
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    again = published.load(written(tmp_path / "again", tensors, described), parts, dtype=torch.float32, device="cpu")
    assert again.config.described | {"target": None} == model.config.described | {"target": None}
    assert SPECBLOCK.write(again.config, weights_of(again), "a target")[0] == described
    assert all(torch.equal(value, weights_of(again)[name]) for name, value in weights_of(model).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shift": False}, "its shift is False, and must be True"),
        ({"broadcast": False}, "its broadcast is False"),
        ({"prefix_entries": "first"}, "its prefix_entries is 'first', and must be 'all'"),
        ({"continues_from": None}, "its continues_from is None"),
        ({"restarts": False}, "its restarts is False"),
        ({"normalise_features": True}, "its normalise_features is True"),
        ({"normalise_rank_inputs": True}, "its normalise_rank_inputs is True"),
        ({"rank_hidden": 64}, "its rank_hidden is 64, and must be 256"),
        ({"rank_scores": 0}, "its rank_scores is 0, and must be 20"),
        ({"rank_biases": True}, "its rank_biases is True"),
        ({"tap_layers": (2, 3, 4)}, r"its tap_layers is \(2, 3, 4\), and must be \(1, 3, 4\)"),
        ({"target.attention_bias": True}, "head_dim, norms or biases"),
        ({"target.head_dim": 24}, "head_dim, norms or biases"),
        ({"target.model_type": "qwen3"}, "head_dim, norms or biases"),
        ({"target.rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "its rope_scaling is 'linear'"),
    ],
)
def test_what_the_form_cannot_hold_is_not_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    model = published.load(specblock(tmp_path / "read"), parts, dtype=torch.float32, device="cpu")
    described = dict(model.config.described)
    for name, value in changes.items():
        if name.startswith("target."):
            described["target"] = {**described["target"], name.removeprefix("target."): value}
        else:
            described[name] = value
    assert SPECBLOCK.write is not None
    with pytest.raises(ValueError, match=message):
        SPECBLOCK.write(config_from(described), weights_of(model), "a target")


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    parts = load(deep_target(tmp_path / "target")).parts
    folder = specblock(tmp_path / "drafter")
    described = json.loads((folder / "config.json").read_text())
    for changes, message in (
        ({"hidden_size": 64}, "its hidden_size is 64, the target's is 48"),
        ({"vocab_size": 300}, "its vocab_size is 300, the target's is 320"),
        ({"rank_classes": 5}, "its rank_classes is 5, and 4 are read"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "its rope_scaling is 'linear'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, "its config sets eagle_config"),
        ({"draft_vocab_size": 41}, "its d2t must list 41 tokens, and lists 40"),
        ({"diffspec_draft_token_num": 5}, "input_layer.position_queries has shape"),
        ({"num_hidden_layers": 3}, "parameters missing"),
        ({"intermediate_size": 80}, r"mlp\.down_proj\.weight has shape"),
        ({"architectures": ["LlamaForCausalLMSpecBlock2"]}, "names LlamaForCausalLMSpecBlock2, which is not among"),
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
