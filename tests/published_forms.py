"""Tiny drafters in the form in which their authors publish them, with what they say computed by plain torch alone."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

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
    states = target.model(tokens[None]).last_hidden_state[0, :-1]  # after the output norm
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
