"""A tiny SpecBlock drafter in its authors' form, with what it says computed by plain torch alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from tests.published_forms import EPSILON, HIDDEN, VOCAB, drawn, layer_shapes, normed, written

BLOCK, DRAFT_VOCAB, CUT, HEADS, DIM = 4, 40, 3, 4, 12


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
    frequencies: Tensor = config.get("rope_theta", 10_000.0) ** (-torch.arange(0, DIM, 2) / DIM)
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
