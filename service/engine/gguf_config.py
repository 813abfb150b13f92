"""Translates metadata of a GGUF file to the transformers config."""

import math

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from service.engine.gguf_families import Architecture, Metadata, Values
from service.engine.gguf_reader import GGUFFile
from service.engine.gguf_recurrent import KNOWN
from service.errors import StartupError

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor that holds divisors of the rotary frequencies, the scaling of Llama 3.1 and later."""

LONG_FACTORS = {f"{kind}_factor": f"rope_factors_{kind}.weight" for kind in ("long", "short")}
"""Names of the tensors that hold such divisors for texts beyond the trained length and for others, by config field."""


def config_of(file: GGUFFile) -> PreTrainedConfig:
    """Build the transformers config of a file. Raises StartupError for unsupported architectures, keys and values."""
    try:
        return _config(architecture_of(file), Metadata(file), file)
    except (TypeError, ValueError, ArithmeticError, StrictDataclassError) as error:
        raise StartupError(
            f"{file.path.name}: a key has a value of the wrong type ({error}); convert the model again"
        ) from error


def _config(architecture: Architecture, keys: Metadata, file: GGUFFile) -> PreTrainedConfig:
    values = _common(architecture, keys, file)
    if architecture.more is not None:
        values |= architecture.more(values, keys, file)
    keys.expect("attention.causal", True)
    keys.expect("expert_count", 0)
    keys.refuse_unread()
    config: PreTrainedConfig = CONFIG_MAPPING[values.pop("model_type", architecture.model_type)](**values)
    return config


def architecture_of(file: GGUFFile) -> Architecture:
    """Look up a file's architecture. Raises StartupError if it is unsupported."""
    known = KNOWN.get(file.architecture)
    if known is None:
        raise StartupError(
            f"{file.path.name}: adaptree does not read GGUF files of architecture {file.architecture!r}, only "
            f"{', '.join(KNOWN)}; give the model's safetensors folder or Hugging Face id instead"
        )
    return known


def _common(architecture: Architecture, keys: Metadata, file: GGUFFile) -> Values:
    """Build the config fields that all architectures share."""
    hidden, heads = keys.need("embedding_length"), keys.need("attention.head_count")
    head_dim = keys.take("attention.key_length", hidden // heads)
    if (values_dim := keys.take("attention.value_length", hidden // heads)) != head_dim:
        raise keys.refuse("attention.value_length", values_dim)
    key, epsilon = architecture.epsilon
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{file.path.name}: tensor 'token_embd.weight' is missing; convert the model again")
    # Where all layers have experts, files may have no other width, as those of Qwen3.5.
    width = keys.take if f"{keys.prefix}expert_feed_forward_length" in file.fields else keys.need
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != embedding.shape[0]:
        raise StartupError(
            f"{file.path.name}: tensor 'token_embd.weight' has {embedding.shape[0]} rows, but the vocabulary has "
            f"{len(tokens)} tokens; convert the model again"
        )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads, by_layer=architecture.layers_differ),
        "head_dim": head_dim,
        "num_hidden_layers": keys.need("block_count"),
        "intermediate_size": width("feed_forward_length", by_layer=architecture.layers_differ),
        "max_position_embeddings": keys.need("context_length"),
        epsilon: keys.need(key),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(architecture, head_dim, keys, file),
        **{name: file.fields.get(f"tokenizer.ggml.{name}") for name in ("bos_token_id", "eos_token_id")},
        "pad_token_id": None,
    }


def _rope(architecture: Architecture, head_dim: int, keys: Metadata, file: GGUFFile) -> Values:
    """Build the rotary parameters with llama.cpp's defaults: a factor without type means linear scaling; YaRN's
    attention factor is the file's times 0.1 ln(factor) + 1 (Peng et al. 2023, equation 22), divided by the same with
    the logarithm times `yarn_log_multiplier`."""
    found: Values = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base", 10_000.0)}
    rotated = keys.take("rope.dimension_count", head_dim)
    if architecture.rotary_part:
        found["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise keys.refuse("rope.dimension_count", rotated)
    linear = keys.take("rope.scale_linear", 0.0)  # name before 2023-09
    factor = keys.take("rope.scaling.factor", linear) or 1.0
    original, kind = keys.take("rope.scaling.original_context_length"), keys.take("rope.scaling.type", "linear")
    fast, slow = keys.take("rope.scaling.yarn_beta_fast", 32.0), keys.take("rope.scaling.yarn_beta_slow", 1.0)
    keys.expect("rope.scaling.yarn_ext_factor", 1.0)
    multiplier = keys.take("rope.scaling.yarn_log_multiplier", 0.0)
    own = keys.take("rope.scaling.attn_factor", 1.0) * keys.take("rope.scaling.yarn_attn_factor", 1.0)
    trained = {} if original is None else {"original_max_position_embeddings": original}
    lists = {
        field: [*map(float, file.tensors[name].data)] for field, name in LONG_FACTORS.items() if name in file.tensors
    }
    if lists or kind == "longrope":
        if len(lists) != len(LONG_FACTORS) or kind not in ("linear", "longrope") or factor != 1:
            raise keys.refuse("rope.scaling.type", f"{kind!r} with factor {factor} and {len(lists)} lists of factors")
        found |= {"rope_type": "longrope", "attention_factor": own, **lists, **trained}
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow, **trained}
        if own != 1 or multiplier:
            found["attention_factor"] = own * (1 + 0.1 * math.log(factor)) / (1 + 0.1 * multiplier * math.log(factor))
    elif kind not in ("linear", "none"):
        raise keys.refuse("rope.scaling.type", repr(kind))
    elif own != 1:
        raise keys.refuse("rope.scaling.attn_factor", own)
    elif kind == "linear" and factor != 1:
        found |= {"rope_type": "linear", "factor": factor}
    return found
