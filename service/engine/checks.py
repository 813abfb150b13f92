"""Checks by config, model type and tensors whether a target can be served; the errors name the cause."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from kernels.families import FAMILIES, RECURRENT, recurrent_of
from service.errors import StartupError

VERIFIED = frozenset({*FAMILIES, "cohere2", "glm4", "starcoder2"})
"""Model types of transformers whose logits are compared with those of other engines by `tests/conformance`. A type is
added together with its row in that suite."""

_NOT_OF_THE_TEXT = re.compile(
    r"(model\.)?mtp(_layers)?\.|(model\.)?\w*(vision|visual|image|audio|video|modal|connector|projector)\w*(\.|$)"
)
"""Weights in a target's files that its text model does not have: of a drafter, which `drafters/trained` reads, and of
other modalities, which nothing reads."""
OF_AN_EXPERT = re.compile(r"(?P<place>.*\.experts\.)(?P<number>\d+)(?P<kind>\..*)")
_INDEX = "model.safetensors.index.json"


def refuse_config(whole: PreTrainedConfig, served: PreTrainedConfig, *, unverified: bool) -> None:
    """Raise StartupError if a target with this configuration cannot be served. `served`: `whole`, or its text model;
    `unverified`: accept model types outside of `VERIFIED`."""
    _refuse_quantised(whole)
    refuse_unsupported(served)
    if not unverified:
        _refuse_unverified(served.get_text_config().model_type)


def _refuse_quantised(config: PreTrainedConfig) -> None:
    """Raise StartupError if the weights in safetensors files are quantised by another method than MXFP4."""
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise StartupError(
            f"the weights are quantised by {method!r}, which adaptree does not read from safetensors; use a checkpoint "
            "in bfloat16, or a GGUF file"
        )


def refuse_unsupported(full_config: PreTrainedConfig) -> None:
    """Raise StartupError if our attention cannot replace the model's, because that is not plain causal attention."""
    config = full_config.get_text_config()
    if getattr(full_config, "is_encoder_decoder", False):
        raise StartupError(f"model type {config.model_type!r} is an encoder-decoder; adaptree serves decoders")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds and not (kinds <= RECURRENT and any(recurrent_of(config.to_dict()))):
        raise StartupError(
            f"model type {config.model_type!r} has layers of kind {sorted(kinds)}, which adaptree cannot run"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # `rope` holds the parameters of all layers, or those of each layer type
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind == "dynamic":
            raise StartupError(
                f"model type {config.model_type!r} scales rotary positions by {kind!r}, with which the text of one "
                "request depends on the length of others; use a checkpoint with rope_type default, linear, yarn, "
                "longrope or llama3"
            )
    if not _takes_attention(full_config) or getattr(config, "max_position_embeddings", None) is None:
        raise StartupError(
            f"model type {config.model_type!r} has an attention of its own, which adaptree cannot replace"
        )


def longrope_factors(config: PreTrainedConfig, max_model_len: int | None) -> Literal["short", "long"] | None:
    """Which of longrope's factors all requests get: the short ones if no text is longer than the model was originally
    trained for. `max_model_len` None: texts are as long as the model supports. Returns None without longrope."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    longest = max_model_len or text.max_position_embeddings
    return "long" if longest > rope["original_max_position_embeddings"] else "short"


def fix_longrope(config: PreTrainedConfig, max_model_len: int | None) -> None:
    """Leave only `longrope_factors` in the configuration. transformers chooses by the longest text of a forward, with
    which the text of one request would depend on others."""
    chosen = longrope_factors(config, max_model_len)
    if chosen is not None:
        rope = config.get_text_config().rope_parameters
        rope["short_factor"] = rope["long_factor"] = rope[f"{chosen}_factor"]


def _takes_attention(config: PreTrainedConfig) -> bool:
    """Whether transformers can replace this model's attention; other models ignore the setting silently."""
    known: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    declared = bool(getattr(known, "_supports_attention_backend", False))  # those of Qwen3-Next do not say so
    return known is None or declared or config.model_type in FAMILIES


def _refuse_unverified(model_type: str) -> None:
    """Raise StartupError for a model type that is not in `VERIFIED`."""
    if model_type not in VERIFIED:
        raise StartupError(
            f"model type {model_type!r} is not verified: no test compares its logits with those of other engines; set "
            f"unverified to serve it anyway. Verified types: {', '.join(sorted(VERIFIED))}"
        )


def refuse_odd_tensors(folder: Path) -> None:
    """Raise StartupError if the safetensors files of a local folder contain a tensor twice, of which transformers would
    silently use the last one, or if an expert lacks a tensor that others have, or has another shape: transformers
    stacks those that there are, without a look at their numbers."""
    index, names = folder / _INDEX, {"model.safetensors"}
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StartupError(f"{index} has no valid weight_map: {error!r}; download it again") from error
    found, shapes = dict[str, str](), dict[str, Any]()
    for file in sorted(folder / name for name in names):
        for key, about in _tensors(file) if file.is_file() else ():
            if key in found:
                raise StartupError(f"{file}: tensor {key!r} occurs twice, first in {found[key]}; remove one of them")
            found[key], shapes[key] = file.name, about.get("shape")
    _refuse_odd_experts(shapes)


def _refuse_odd_experts(shapes: Mapping[str, Any]) -> None:
    experts = [match for match in map(OF_AN_EXPERT.fullmatch, shapes) if match is not None]
    count = 1 + max((int(one["number"]) for one in experts), default=-1)
    places, kinds = (Counter(one[name] for one in experts) for name in ("place", "kind"))
    usual = [kind for kind, times in kinds.items() if 2 * times > max(kinds.values())]
    wanted = [[f"{place}{number}{kind}" for number in range(count)] for place in places for kind in usual]
    missing = sorted(name for names in wanted for name in names if name not in shapes)
    if missing:
        raise StartupError(f"the files contain no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
    for names in wanted:
        (shape, _), *_ = Counter(str(shapes[name]) for name in names).most_common()
        for name in names:
            if str(shapes[name]) != shape:
                raise StartupError(f"tensor {name!r} has the shape {shapes[name]}, but those of other experts {shape}")


def _tensors(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read names and descriptions of tensors in the header of a safetensors file; duplicates are returned twice."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, file.stat().st_size))
    try:
        pairs: list[tuple[str, Any]] = json.loads(header, object_pairs_hook=list)
        return [(name, dict(about)) for name, about in pairs if name != "__metadata__"]
    except (ValueError, TypeError) as error:
        raise StartupError(f"{file}: the weights are damaged; copy or download them again: {error}") from error


def text_bytes(files: Iterable[Path]) -> int:
    """Bytes of the weights in safetensors files, without those that `_NOT_OF_THE_TEXT` names. Raises StartupError."""
    tensors = (tensor for file in files for tensor in _tensors(file))
    spans = (about["data_offsets"] for name, about in tensors if not _NOT_OF_THE_TEXT.match(name))
    return sum(end - begin for begin, end in spans)


def refuse_incomplete(report: Mapping[str, Collection[Any]], config: PreTrainedConfig) -> None:
    """Raise StartupError for missing weights and weights of another shape, which transformers would initialise at
    random, and for weights that the model does not have, which it would ignore. `report`: transformers'
    `output_loading_info`."""
    missing, others = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    for key, theirs, ours in report["mismatched_keys"]:
        raise StartupError(f"tensor {key!r} has the shape {list(theirs)}, but config.json requires {list(ours)}")
    if missing:
        tied = "; if it is the embedding's, set tie_word_embeddings to true in config.json"
        raise StartupError(
            f"the files contain no weights for {', '.join(missing[:3])} ({len(missing)} in all)"
            + (tied if missing == ["lm_head.weight"] else "")
        )
    text = config.get_text_config()
    module = f"model.layers.{text.num_hidden_layers}." if getattr(text, "num_mtp_layers", 0) else None
    unread = [key for key in others if not _NOT_OF_THE_TEXT.match(key) and not (module and key.startswith(module))]
    if unread:
        raise StartupError(
            f"the files contain {', '.join(unread[:3])} ({len(unread)} in all), which a model of type "
            f"{config.model_type!r} with this config.json does not have: these weights would be ignored"
        )
