"""Tiny drafters in the form in which their authors publish them, with what they say computed by plain torch alone."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from drafters.network.checkpoint import TargetParts
from service.engine.weights import completed
from tests.conformance.gguf_writer import Contents, contents, stored_as
from tests.conformance.vocabularies import tiny_byte_pairs
from tests.tiny_models import stock, tiny_model

HIDDEN, VOCAB = 48, 320
EPSILON = 1e-6


def normed(x: Tensor, gain: Tensor, epsilon: float = EPSILON) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * gain


def drawn(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Random weights under which states keep their size."""
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: value / value.shape[-1] ** 0.5 if value.ndim > 1 else 1.0 + 0.2 * value if "norm" in name else value * 0.2
        for name, value in values.items()
    }


def layer_shapes(prefix: str, *, reads: int, biases: bool) -> dict[str, tuple[int, ...]]:
    """A layer of 4 heads on 2, whose attention reads so much; the feed-forward's width is 96."""
    attention = {f"self_attn.{name}_proj.weight": (width, reads) for name, width in (("q", 48), ("k", 24), ("v", 24))}
    bias = {name.replace("weight", "bias"): shape[:1] for name, shape in attention.items()} if biases else {}
    others: dict[str, tuple[int, ...]] = {
        "self_attn.o_proj.weight": (HIDDEN, 48),
        "mlp.gate_proj.weight": (96, HIDDEN),
        "mlp.up_proj.weight": (96, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 96),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    return {prefix + name: shape for name, shape in {**attention, **bias, **others}.items()}


def mimo(folder: Path, *, tied: bool = False) -> Path:
    """A target of MiMo's form, with its module: Qwen2's in name and weights but for these."""
    tiny_model("qwen2", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if not tied:
        tensors |= drawn({"lm_head.weight": (VOCAB, HIDDEN)}, seed=8)
        tensors["lm_head.weight"] *= 3.0
    own: dict[str, tuple[int, ...]] = {f"{name}_layernorm.weight": (HIDDEN,) for name in ("token", "hidden", "final")}
    own |= {"input_proj.weight": (HIDDEN, 2 * HIDDEN), **layer_shapes("", reads=HIDDEN, biases=True)}
    tensors |= drawn({f"model.mtp_layers.0.{name}": shape for name, shape in own.items()}, seed=7)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "num_nextn_predict_layers": 1,
        "attention_bias": True,
        "tie_word_embeddings": tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYERS = 3
_EXPERTS: dict[str, object] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GLM: dict[str, object] = {"n_routed_experts": 6, "n_group": 2, "routed_scaling_factor": 1.5, "attention_bias": True}
_QWEN: dict[str, object] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mtp_layer_types": ["full_attention"],
    "num_mtp_layers": 1,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
}
_OF_QWEN: dict[str, object] = {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40}
WITH_MODULES: dict[str, dict[str, object]] = {
    "glm4_moe": {**_GLM, **_EXPERTS, "use_qk_norm": True},
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": {**_QWEN, **_OF_QWEN},
    "qwen3_next": {**_QWEN, **_OF_QWEN},
}
"""Families of targets with a module, and their options."""


def with_module(folder: Path, family: str, **others: Any) -> Path:
    """A target with a module, of which the layer is like the target's last one; `others`: options of its config."""
    sizes: dict[str, Any] = {"head_dim": 16, **WITH_MODULES[family], **others}
    last = f"model.layers.{LAYERS - 1}."
    layer = load_file(tiny_model(family, folder, seed=1, **sizes) / "model.safetensors")
    prefix, inner, parts = "mtp.", "layers.0.", ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    if family == "glm4_moe":
        prefix, inner, parts = f"model.layers.{LAYERS}.", "", ("eh_proj", "hnorm", "enorm", "shared_head.norm")
    hidden: int = sizes.get("hidden_size", HIDDEN)
    shapes = {f"{prefix}{part}.weight": (hidden, 2 * hidden)[: 1 + (part == parts[0])] for part in parts}
    own = {f"{prefix}{inner}{name.removeprefix(last)}": layer[name] for name in layer if name.startswith(last)}
    file = tiny_model(family, folder, **sizes) / "model.safetensors"
    save_file({**load_file(file), **own, **drawn(shapes, seed=3)}, file, metadata={"format": "pt"})
    return folder


_FILES = {"glm4_moe": "glm4moe", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}
_WIDE = dict.fromkeys(("hidden_size", "intermediate_size"), 256) | {"head_dim": 64}
_WIDE |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
_WIDE_EXPERTS = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256)


def file_with_module(folder: Path, family: str, kind: Kind, *, wide: bool = False) -> Contents:
    """The same target as a GGUF file: the module is the block after the last layer. The folder stays. `wide`: every
    matrix can have blocks of 256 columns."""
    options, arch = WITH_MODULES[family], _FILES[family]
    others = (_WIDE | (_WIDE_EXPERTS if "moe_intermediate_size" in options else {})) if wide else {}
    target = stock(with_module(folder, family, **others))
    stored, sizes = load_file(folder / "model.safetensors"), dict[str, Any]({"head_dim": 16, **options, **others})
    other = stock(tiny_model(family, folder / "other", seed=1, **sizes)).state_dict()
    last, after = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    kinds = getattr(target.config, "layer_types", None)
    changes = {"num_hidden_layers": LAYERS + 1, **({"layer_types": [*kinds, "full_attention"]} if kinds else {})}
    config = type(target.config).from_dict({**target.config.to_dict(), **changes})
    deeper = AutoModelForCausalLM.from_config(config)
    layer = {name.replace(last, after): value for name, value in other.items() if name.startswith(last)}
    deeper.load_state_dict({**target.state_dict(), **layer})
    found = contents(deeper, arch, kind, tiny_byte_pairs())
    prefix, names = "mtp.", ("fc", "pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")
    if family == "glm4_moe":
        prefix, names = after, ("eh_proj", "hnorm", "enorm", "shared_head.norm")
    for theirs, ours in zip(("eh_proj", "hnorm", "enorm", "shared_head_norm"), names, strict=True):
        name, value = f"blk.{LAYERS}.nextn.{theirs}.weight", stored[f"{prefix}{ours}.weight"].float().numpy()
        found.tensors[name] = stored_as(name, value, config, arch, kind, quantize)
    count = {f"{arch}.nextn_predict_layers": 1} | ({f"{arch}.full_attention_interval": LAYERS} if kinds else {})
    return Contents(found.keys | count, found.tensors)


def parts_of(oracle: PreTrainedModel) -> TargetParts:
    """What a drafter reads of a target that transformers runs."""
    table, head = (module.get_parameter("weight") for module in (oracle.get_input_embeddings(), oracle.lm_head))
    return TargetParts("", table, head, None, oracle.config.get_text_config().to_dict(), completed)


def read_as_qwen2(folder: Path, copy: Path) -> PreTrainedModel:
    """The same target by transformers' own code."""
    config = json.loads((folder / "config.json").read_text())
    copy.mkdir()
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    del config["auto_map"], config["attention_bias"]
    (copy / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "mtp" not in name}
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return stock(copy)


@torch.no_grad()
def mimo_says(folder: Path, target: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits of the module at all positions of a text but the last, of the token after the next one each.
    # tokens [length] -> [length - 1, vocab]"""
    own = {
        name.removeprefix("model.mtp_layers.0."): value
        for name, value in load_file(folder / "model.safetensors").items()
        if "mtp" in name
    }
    put_out: list[Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda _, args: put_out.append(args[0]))
    target.model(tokens[None])
    hook.remove()
    states = put_out[0][0, :-1]  # before the output norm
    embedded = target.get_input_embeddings()(tokens[1:])
    epsilon = target.config.rms_norm_eps
    parts = (states, own.pop("hidden_layernorm.weight")), (embedded, own.pop("token_layernorm.weight"))
    joined = torch.cat([normed(x, gain, epsilon) for x, gain in parts], dim=-1) @ own.pop("input_proj.weight").T
    final = own.pop("final_layernorm.weight")
    layer = Qwen2DecoderLayer(target.config, 0)  # type: ignore[arg-type]  # it is Qwen2's
    layer.load_state_dict(own)
    length = len(joined)
    rotary = target.model.rotary_emb(joined[None], torch.arange(length)[None])
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    output = layer(joined[None], attention_mask=mask, position_embeddings=rotary)
    output = output if isinstance(output, Tensor) else output[0]
    head = target.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    logits: Tensor = head(normed(output[0], final, epsilon))
    return logits


def deep_target(folder: Path) -> Path:
    """A Llama of eight layers: EAGLE-3 taps three that differ."""
    return tiny_model("llama", folder, num_hidden_layers=8)


DRAFT_VOCAB = 40


MASK_TOKEN = 17


def eagle3(folder: Path, *, torn: str | None = None, layers: int = 1, nested: bool = False, **flags: bool) -> Path:
    """A drafter of that form, of other head counts than the target's; `torn`: without this tensor; `nested`: as
    speculators writes it; flags: those of its config that are set."""
    first = "midlayer." if not nested else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        **layer_shapes(first, reads=2 * HIDDEN, biases=False),
        f"{first}hidden_norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    for number in range(1, layers):
        shapes |= layer_shapes(f"layers.{number}.", reads=HIDDEN, biases=False)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (HIDDEN,) for tap in range(3)}
    if flags.get("norm_before_fc"):
        shapes |= {"input_norm.weight": (3 * HIDDEN,)}
    tensors = drawn(shapes, seed=5)
    tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:DRAFT_VOCAB].sort().values
    tensors |= {"d2t": tokens - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), tokens)}
    tensors.pop(torn, None) if torn else None
    sizes = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPSILON,
    }
    if not nested:
        config = {"architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 10_000.0, **sizes}
    else:
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "transformer_layer_config": sizes,  # without what is as in `LlamaConfig`
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        }
    return written(folder, tensors, {**config, "draft_vocab_size": DRAFT_VOCAB, **flags})


def written(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def eagle3_says(folder: Path, features: Tensor, embedded: Tensor, further: Tensor) -> Tensor:
    """Logits behind a text, then behind each of some further tokens on its own states.
    # features [length, 3 * hidden], embedded [length, hidden] of the tokens after, further [steps, hidden]"""
    own, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    states, tokens, logits = conditions(own, features), embedded, []
    for step in range(len(further) + 1):
        last = eagle3_states(own, config, states, tokens)[-1]
        output = normed(last, own["norm.weight"])
        logits.append(output @ own["lm_head.weight"].T)
        if step < len(further):
            following = output if config.get("norm_output") else last
            states, tokens = torch.cat([states, following[None]]), torch.cat([tokens, further[step : step + 1]])
    return torch.stack(logits)


def conditions(own: dict[str, Tensor], features: Tensor) -> Tensor:
    """# features [length, 3 * hidden] -> [length, hidden]"""
    if "input_norm.weight" in own:
        features = normed(features, own["input_norm.weight"])
    if "fc_norm.0.weight" in own:
        taps = [normed(part, own[f"fc_norm.{tap}.weight"]) for tap, part in enumerate(features.chunk(3, dim=-1))]
        features = torch.cat(taps, dim=-1)
    return features @ own["fc.weight"].T


def eagle3_states(own: dict[str, Tensor], config: dict[str, object], states: Tensor, tokens: Tensor) -> Tensor:
    """States before the output norm. # states, tokens [length, hidden] -> [length, hidden]"""
    names = ["midlayer." if "midlayer.mlp.up_proj.weight" in own else "layers.0.", "layers.1.", "layers.2."]
    for number, prefix in enumerate(names):
        layer = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        if not layer:
            continue
        token = normed(tokens, layer["input_layernorm.weight"])
        if number == 0:
            inner = normed(states, layer["hidden_norm.weight"])
            read = torch.cat([token, inner], dim=-1)
            states = inner if config.get("norm_before_residual") else states
        else:
            read = normed(states, layer["input_layernorm.weight"])
        states = states + attention(read, layer)
        x = normed(states, layer["post_attention_layernorm.weight"])
        gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        states = states + (nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return states


def attention(read: Tensor, layer: dict[str, Tensor]) -> Tensor:
    """Causal, of 4 heads on 2 with 12 dimensions. # read [length, ...] -> [length, hidden]"""
    length = len(read)
    query, key, value = (
        (read @ layer[f"self_attn.{name}_proj.weight"].T).view(length, -1, 12).transpose(0, 1) for name in "qkv"
    )
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, 12, 2) / 12)
    cos, sin = (torch.cat([wave, wave], dim=-1) for wave in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        return x * cos + torch.cat([-x[..., 6:], x[..., :6]], dim=-1) * sin

    key, value = (x.repeat_interleave(2, dim=0) for x in (turned(key), value))
    scores = turned(query) @ key.transpose(1, 2) / 12**0.5
    mixed = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf")).softmax(-1) @ value
    return mixed.transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T


DFLASH_TAPS = (1, 4, 6)
DFLASH_BLOCK = 5


def dflash_target(folder: Path, *, tied: bool = True) -> Path:
    """A Qwen3 of eight layers, the small ones of which have one table for embedding and head."""
    return tiny_model("qwen3", folder, num_hidden_layers=8, tie_word_embeddings=tied)


def dflash(folder: Path, *, nested: bool = False, layers: int = 2, own: bool = False, **changes: object) -> Path:
    """A drafter of that form, or as speculators writes it; `own`: with an output layer and a vocabulary of its own;
    changes: of `dflash_config`, or of speculators' config."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for number in range(layers):
        prefix = f"layers.{number}."
        wide = {
            f"{prefix}self_attn.{name}_proj.weight": (width, HIDDEN)
            for name, width in zip("qkv", (64, 32, 32), strict=True)
        }
        norms = {f"{prefix}self_attn.{name}_norm.weight": (16,) for name in "qk"}
        shapes |= layer_shapes(prefix, reads=HIDDEN, biases=False) | wide | norms
        shapes |= {f"{prefix}self_attn.o_proj.weight": (HIDDEN, 64)}
    shapes |= {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)} if own else {}
    tensors = drawn(shapes, seed=15)
    if own:
        tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:DRAFT_VOCAB].sort().values
        tensors |= {"d2t": tokens - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), tokens)}
    sizes: dict[str, object] = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": EPSILON,
        "rope_theta": 1_000_000.0,
    }
    config: dict[str, object]
    if nested:
        config = {"speculators_model_type": "dflash", "mask_token_id": MASK_TOKEN}
        config |= {"transformer_layer_config": sizes, "draft_vocab_size": DRAFT_VOCAB if own else VOCAB}
        config |= {"aux_hidden_state_layer_ids": [tap + 1 for tap in DFLASH_TAPS], **changes}
    else:
        inside = {"mask_token_id": MASK_TOKEN, "target_layer_ids": list(DFLASH_TAPS), **changes}
        config = {"architectures": ["DFlashDraftModel"], **sizes, "num_target_layers": 8, "dflash_config": inside}
    return written(folder, tensors, {**config, "block_size": DFLASH_BLOCK})


@torch.no_grad()
def dflash_says(folder: Path, features: Tensor, rows: Tensor, head: Tensor, *, causal: bool) -> Tensor:
    """Logits of all rows of a block behind a text. # features [length, 3 * hidden], rows [block, hidden]: embeddings of
    the token after the text and of mask tokens; head [vocab, hidden] -> [block, vocab]"""
    own, length, block = load_file(folder / "model.safetensors"), len(features), len(rows)
    context = normed(features @ own["fc.weight"].T, own["hidden_norm.weight"])
    angles = torch.arange(length + block)[:, None] * 1_000_000.0 ** (-torch.arange(0, 16, 2) / 16)
    cos, sin = (torch.cat([wave, wave], dim=-1)[:, None] for wave in (angles.cos(), angles.sin()))

    def heads(x: Tensor, layer: dict[str, Tensor], name: str) -> Tensor:
        split = (x @ layer[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, 16)
        if name == "v":
            return split
        split, at = normed(split, layer[f"self_attn.{name}_norm.weight"]), slice(length + block - len(x), None)
        return split * cos[at] + torch.cat([-split[..., 8:], split[..., :8]], dim=-1) * sin[at]

    hidden = rows
    for number in range(9):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        if not layer:
            break
        x = normed(hidden, layer["input_layernorm.weight"])
        query = heads(x, layer, "q")
        key, value = (heads(torch.cat([context, x]), layer, name).repeat_interleave(2, dim=1) for name in "kv")
        scores = torch.einsum("qhd,khd->hqk", query, key) / 4.0
        hidden_from = torch.ones(block, length + block).triu(length + 1).bool() & causal
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden_from, float("-inf")).softmax(-1), value)
        hidden = hidden + mixed.flatten(1) @ layer["self_attn.o_proj.weight"].T
        x = normed(hidden, layer["post_attention_layernorm.weight"])
        gate, up = (x @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (nn.functional.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return normed(hidden, own["norm.weight"]) @ head.T
