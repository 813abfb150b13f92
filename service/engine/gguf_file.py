"""Loads models from GGUF files, and drafters that files of targets hold. Quantised matrices keep their blocks or are
dequantised to the model's dtype."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.folders import FILES, DrafterInFile
from drafters.network.checkpoint import HEAD, DrafterError, even_sample
from kernels.experts import QuantisedStack
from kernels.layers import COLUMNS, QuantisedWeight
from service.engine.gguf_blocks import PLAIN, dense, kept, numbers, part_of, unit_of
from service.engine.gguf_config import LONG_FACTORS, ROPE_FACTORS, architecture_of, config_of
from service.engine.gguf_families import Architecture
from service.engine.gguf_reader import GGUFFile, GGUFTensor, open_gguf
from service.engine.gguf_recurrent import tensors_of
from service.engine.modules import (
    STACKS,
    QuantisedEmbedding,
    QuantisedExperts,
    QuantisedLinear,
    decoder_layers,
    empty_model,
    is_experts,
    layer_weights,
)
from service.engine.shards import SAMPLES, ModelShard
from service.errors import StartupError

logger = logging.getLogger(__name__)

_OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
"""Weights of a model outside of its layers."""
_MODULE = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
"""What a multi-token prediction module has beside a layer, by llama.cpp's names and by those of safetensors."""
_COPIES = ("embed_tokens", "shared_head_head")
"""What files may also hold of it: copies of the target's embedding and head, which are not read."""


def load_gguf(
    file: GGUFFile,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str,
    *,
    in_blocks: bool,
    whole: bool = True,
    part: ModelShard | None = None,
) -> PreTrainedModel:
    """Load a model to the CPU in `dtype`. `in_blocks`: keep quantised matrices as `QuantisedWeight`, and all other
    weights in float32, as llama.cpp does; not `whole`: embedding, last norm and head may be missing; `part`: what one
    of several devices loads. Raises StartupError for missing or unknown tensors and wrong shapes."""
    if in_blocks:
        dtype = torch.float32
    model = empty_model(config, dtype, attention)
    architecture, counts = architecture_of(file), Counter[str]()
    places = _places(architecture, model)
    if part is not None:
        part.plan(model, partial(_unit, file, {ours: theirs for theirs, ours in places.items()}, in_blocks))
    elsewhere = _take_experts(model, file, counts, in_blocks, part) | set(LONG_FACTORS.values())
    for name, tensor in tensors_of(file, config):
        if name in elsewhere or name.startswith(_unused(config)):
            continue
        try:
            ordered = _as_transformers_has_it(tensor, name, config, architecture)
            counts[_take(model, name, places.get(name), ordered, in_blocks, part)] += prod(tensor.shape)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise StartupError(f"{file.path.name}: tensor {name!r} cannot be used: {error}") from error
        file.give_back()
    if part is not None:
        part.part_head(model, in_blocks=in_blocks)
    elif config.tie_word_embeddings:
        _tie(model)
    named = {ours: theirs for theirs, ours in places.items()}
    empty = (name for name, value in model.named_parameters() if value.is_meta and (whole or name not in _OUTSIDE))
    missing = [named.get(name, name) for name in empty]
    missing += [named[name] for name, _ in model.named_buffers() if name in named and named[name] not in file.tensors]
    if missing:
        raise StartupError(
            f"{file.path.name}: weights are missing for {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    shares = ", ".join(f"{name} {count / 1e6:.0f} M" for name, count in counts.most_common())
    logger.info("%s: number of weights by type: %s", file.path.name, shares)
    return model


def _unit(file: GGUFFile, names: Mapping[str, str], in_blocks: bool, place: str) -> int:
    """Number of columns of the weight at this place that cannot be parted. `names`: of tensors by place."""
    tensor = file.tensors.get(names.get(place, ""))
    return COLUMNS if tensor is None else unit_of(tensor.kind, in_blocks=in_blocks)  # a missing one is refused later


def _places(architecture: Architecture, model: PreTrainedModel) -> dict[str, str]:
    """Map tensor names to those of the model's parameters and buffers."""
    names, held = architecture.names(model.config.num_hidden_layers), model.state_dict().keys()
    return {theirs: ours for theirs, ours in names.items() if ours in held}


def _unused(config: PreTrainedConfig) -> tuple[str, ...]:
    """Prefixes of tensors that llama.cpp does not run either: those after the last layer, of a drafter, and keys and
    values of layers that read those of earlier ones."""
    last = config.num_hidden_layers
    readers = range(last - getattr(config, "num_kv_shared_layers", 0), last)
    drafter = [f"blk.{last + index}." for index in range(getattr(config, "num_mtp_layers", 0))]
    return (*drafter, *(f"blk.{index}.attn_{name}" for index in readers for name in ("k", "v")))


def _take_experts(
    model: PreTrainedModel, file: GGUFFile, counts: Counter[str], in_blocks: bool, part: ModelShard | None
) -> set[str]:
    """Load the experts of all layers, or a device's; `counts`: number of weights by the format in which they are kept.
    Returns the names of the tensors that were used."""
    used = set[str]()
    for number, layer in enumerate(decoder_layers(model)):
        for name in [name for name, module in layer.named_modules() if is_experts(module)]:
            (place, _, own_name), prefix = name.rpartition("."), f"blk.{number}.ffn_"
            path = f"model.layers.{number}.{name}"
            loader = _ExpertLoader(file, prefix, path, model.dtype, counts, in_blocks, part)
            try:
                experts, names = loader.load(layer.get_submodule(name))
            except (NotImplementedError, ValueError, RuntimeError) as error:
                raise StartupError(f"{file.path.name}: experts of layer {number} cannot be used: {error}") from error
            setattr(layer.get_submodule(place), own_name, experts)
            used |= names
    return used


_Read = Callable[[Sequence[int]], Tensor]
"""Reads experts of a parameter: [own experts, ...]."""


@dataclass(frozen=True, slots=True)
class _ExpertLoader:
    """Loads the experts of a layer."""

    file: GGUFFile
    prefix: str  # of their tensors
    place: str  # of their module in the model
    dtype: torch.dtype
    counts: Counter[str]  # number of weights by format, to which is added
    in_blocks: bool
    part: ModelShard | None

    def load(self, experts: nn.Module) -> tuple[nn.Module, set[str]]:
        """Load transformers' module of experts. Returns the module, or `QuantisedExperts` if matrices are kept in
        blocks, and the names of the tensors. Raises ValueError for missing tensors and wrong shapes."""
        stacks, used = dict[str, QuantisedStack](), set[str]()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            turned = name in STACKS and bool(experts.is_transposed)
            parts = self._parts(name, tuple((parameter.mT if turned else parameter).shape))
            used |= parts.keys()
            if self.in_blocks and name in STACKS and not any(part.kind in PLAIN for part in parts.values()):
                stacks[name] = self._in_blocks(name, [*parts.values()])
            else:
                interleaved = not experts.is_concatenated and len(parts) > 1
                read = partial(_joined, parts.values(), tuple(parameter.shape), self.dtype, turned, interleaved)
                values = self._values(name, tuple(parameter.shape), parts.values(), read)
                setattr(experts, name, nn.Parameter(values, requires_grad=False))
                self.counts[str(self.dtype).removeprefix("torch.")] += values.numel()
            self.file.give_back()
        return (QuantisedExperts(experts, stacks) if stacks else experts), used

    def _own(self, name: str) -> slice:
        """The experts that the device has."""
        found = None if self.part is None else self.part.range_of(f"{self.place}.{name}")
        return slice(None) if found is None else found[1][0]

    def _parts(self, name: str, shape: tuple[int, ...]) -> dict[str, GGUFTensor]:
        """Find the tensors whose rows together are those of a parameter: gate and up rows may be in one or in two.
        # shape (experts, out, in), or (experts, out) of a bias"""
        kind = "bias" if name.endswith("_bias") else "weight"
        stem = name.removesuffix("_bias").removesuffix("_proj")
        whole = f"{self.prefix}{stem}_exps.{kind}"
        found = self.file.tensors
        names = [whole] if whole in found else [f"{self.prefix}{part}_exps.{kind}" for part in stem.split("_")]
        expected = (shape[0], shape[1] // len(names), *shape[2:])
        for one in names:
            if one not in found or found[one].shape != expected:
                raise ValueError(f"{one} is missing or has another shape than the metadata's {list(expected)}")
        return {one: found[one] for one in names}

    def _in_blocks(self, name: str, parts: Sequence[GGUFTensor]) -> QuantisedStack:
        """Keep the device's experts in blocks."""
        count, _, columns = parts[0].shape
        stack = QuantisedStack([self._kept(parts, expert) for expert in range(count)[self._own(name)]])
        if self.part is not None:
            shape = count, sum(part.shape[1] for part in parts), columns
            self.part.note_stack(f"{self.place}.{name}", shape, partial(self._rows, parts))
        return stack

    def _kept(self, parts: Sequence[GGUFTensor], expert: int) -> QuantisedWeight:
        found = list[QuantisedWeight]()
        for part in parts:
            weight, form = kept(part.data[expert], part.kind, self.dtype)
            self.counts[form] += prod(part.shape[1:])
            found.append(weight)
        return type(found[0]).joined(found)

    def _rows(self, parts: Sequence[GGUFTensor], expert: int, rows: Tensor) -> Tensor:
        """Rows of an expert as they are kept, dequantised. # rows [rows] int64 -> [rows, in]"""
        places = [divmod(row, parts[0].shape[1]) for row in rows.tolist()]  # planned transfer: at start
        given = [(parts[part].data[expert][row : row + 1], parts[part].kind) for part, row in places]
        return torch.cat([kept(data, kind, self.dtype)[0].dense() for data, kind in given])

    def _values(self, name: str, shape: tuple[int, ...], parts: Collection[GGUFTensor], read: _Read) -> Tensor:
        """Dequantise a parameter of the device's experts. `shape`: of all experts'; `read`: see `_joined`."""
        if self.part is not None:
            if len(shape) == 2:  # biases, which are few
                sample = even_sample(read(range(shape[0])), SAMPLES)
            else:  # of the file's bytes: the devices compare them
                data = [part.data.reshape(-1) for part in parts]
                some = np.concatenate([one[:: max(1, len(one) // SAMPLES)] for one in data])
                sample = torch.from_numpy(some.astype(np.float64))
            self.part.samples[f"{self.place}.{name}"] = shape, sample
        return read(range(shape[0])[self._own(name)])


def _joined(
    parts: Collection[GGUFTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    turned: bool,
    interleaved: bool,
    experts: Sequence[int],
) -> Tensor:
    """Dequantise a parameter of these experts, in transformers' layout: `turned` [experts, in, out] instead of
    [experts, out, in], `interleaved` with gate and up rows by turns. `shape`: of all experts'."""
    values = torch.empty(len(experts), *shape[1:], dtype=dtype)
    for expert, place in zip(experts, values, strict=True):
        rows = torch.cat([dense(GGUFTensor(part.shape[1:], part.kind, part.data[expert]), dtype) for part in parts])
        if interleaved:
            rows = rows.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        place.copy_(rows.T if turned else rows)
    return values


def _take(
    model: PreTrainedModel, name: str, place: str | None, tensor: GGUFTensor, in_blocks: bool, part: ModelShard | None
) -> str:
    """Load a tensor, or a device's part of it, into the model. Returns the name of the format in which it is kept.
    Raises ValueError for a tensor that does not fit the model."""
    if name == ROPE_FACTORS:
        return _scale_frequencies(model, tensor)
    if place is None:
        raise ValueError("this model has no such weight, so it would be ignored")
    module, _, parameter = place.rpartition(".")
    expected = tuple(getattr(model.get_submodule(module), parameter).shape)
    if tensor.kind in PLAIN and tensor.shape != expected and _sizes(tensor.shape) == _sizes(expected):
        tensor = tensor._replace(shape=expected, data=tensor.data.reshape(expected))
    if tensor.shape != expected:
        raise ValueError(f"its shape is {list(tensor.shape)}, but the file's metadata requires {list(expected)}")
    if part is not None and (own := part.range_of(place)) is not None:
        part.note(place, tensor.shape, lambda rows: _sample(model, place, tensor, rows, in_blocks))
        tensor = part_of(tensor, *own)
    return _put(model, place, tensor, in_blocks)


def _sample(model: PreTrainedModel, place: str, tensor: GGUFTensor, rows: Tensor, in_blocks: bool) -> Tensor:
    """Rows of a weight as they are kept, dequantised. # rows [rows] int64 -> [rows, ...]"""
    some = tensor._replace(shape=(len(rows), *tensor.shape[1:]), data=tensor.data[rows.numpy()])
    if _in_model_dtype(model, place, some, in_blocks):
        return dense(some, model.dtype)
    return kept(some.data, some.kind, model.dtype)[0].dense()


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """The sizes of a tensor that are not 1."""
    return [size for size in shape if size != 1]


def _as_transformers_has_it(
    tensor: GGUFTensor, name: str, config: PreTrainedConfig, architecture: Architecture
) -> GGUFTensor:
    """Convert a tensor to transformers' layout: norm weights without the added 1, rotary pairs as two halves of each
    head."""
    module = name.split(".")[-2] if "." in name else name
    if architecture.norms_plus_one and module.endswith("norm") and module != "ssm_norm":
        return GGUFTensor(tensor.shape, GGMLQuantizationType.F32, dequantize(tensor.data, tensor.kind) - 1)
    if architecture.pairs_adjacent and module in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if module == "attn_q" else config.num_key_value_heads
        pairs = tensor.data.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.data.shape[1:])
        return tensor._replace(data=pairs.swapaxes(1, 2).reshape(tensor.data.shape))
    return tensor


def _scale_frequencies(model: PreTrainedModel, factors: GGUFTensor) -> str:
    """Divide the model's rotary frequencies, those of layers without a window, by the file's factors. Returns the name
    of their dtype. # factors [rotary_dim / 2]"""
    buffers = dict(model.get_decoder().named_buffers())
    frequencies = buffers.get("rotary_emb.inv_freq", buffers.get("rotary_emb.full_attention_inv_freq"))
    if frequencies is None:
        raise ValueError("this model has no rotary frequencies")
    frequencies /= numbers(factors).view_as(frequencies)
    return str(frequencies.dtype).removeprefix("torch.")


def _put(model: PreTrainedModel, name: str, tensor: GGUFTensor, in_blocks: bool) -> str:
    """Set a parameter of the model. Returns the name of the format in which it is kept."""
    place, _, parameter = name.rpartition(".")
    parent_name, _, own_name = place.rpartition(".")
    parent, module, dtype = model.get_submodule(parent_name), model.get_submodule(place), model.dtype
    if parameter in dict(module.named_buffers(recurse=False)):
        module.get_buffer(parameter).copy_(numbers(tensor))
        return "float32"
    if _in_model_dtype(model, name, tensor, in_blocks):
        setattr(module, parameter, nn.Parameter(dense(tensor, dtype), requires_grad=False))
        return str(dtype).removeprefix("torch.")
    weight, form = kept(tensor.data, tensor.kind, dtype, tensor.columns)
    if isinstance(module, nn.Linear):
        held: nn.Module = QuantisedLinear(weight, dict(module.named_parameters()).get("bias"))
    else:
        held = QuantisedEmbedding(weight, float(getattr(module, "scalar_embed_scale", 1)))
    setattr(parent, own_name, held)
    return form


def _in_model_dtype(model: PreTrainedModel, name: str, tensor: GGUFTensor, in_blocks: bool) -> bool:
    """Whether a parameter is not kept in blocks."""
    place, _, parameter = name.rpartition(".")
    is_matrix = parameter == "weight" and isinstance(model.get_submodule(place), nn.Linear | nn.Embedding)
    return not (in_blocks and is_matrix) or tensor.kind in PLAIN


def _tie(model: PreTrainedModel) -> None:
    embedding = model.get_input_embeddings()
    if isinstance(embedding, QuantisedEmbedding):
        model.set_output_embeddings(QuantisedLinear(embedding.weight, None))
    else:
        model.tie_weights()


@lru_cache(maxsize=1)  # a start asks several times, and a header with a vocabulary takes a while
def drafter_in(path: Path) -> DrafterInFile:
    """Open the multi-token prediction module in a target's file, which llama.cpp's converter writes as the block after
    the last layer (conversion/qwen.py, glm.py). Without such tensors there is none, as llama.cpp does with files that
    only count it. Raises StartupError for damaged and unsupported files."""
    file = open_gguf(path)
    if not file.fields.get(f"{file.architecture}.nextn_predict_layers"):
        return DrafterInFile({}, lambda prefix: {})
    config = config_of(file)
    if not any(name.startswith(f"blk.{config.num_hidden_layers}.nextn.") for name in file.tensors):
        logger.info("%s: nextn_predict_layers counts a module that drafts, but its tensors were left out", path.name)
        return DrafterInFile({}, lambda prefix: {})
    return DrafterInFile(config.to_dict(), partial(_module_in, file, config))


def _module_in(file: GGUFFile, config: PreTrainedConfig, prefix: str) -> dict[str, Any]:
    """Read a module's weights by the names of GLM's module, which begin with `prefix`, and the target's output norm and
    head. Raises DrafterError. # -> [...] each"""
    block = f"blk.{config.num_hidden_layers}."
    layer = {name.replace(block, "blk.0."): tensor for name, tensor in file.tensors.items() if name.startswith(block)}
    outside = {f"{prefix}{ours}.weight": f"{block}nextn.{theirs}.weight" for theirs, ours in _MODULE.items()}
    outside |= {"model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
    known = {*outside.values(), *(f"{block}nextn.{name}.weight" for name in _COPIES)}
    if missing := sorted(outside.values() - file.tensors.keys() - {"output.weight"}):
        raise DrafterError(f"{file.path.name}: tensor {missing[0]!r} of the module that drafts is missing")
    if unknown := [name for name in file.tensors if name.startswith(f"{block}nextn.") and name not in known]:
        raise DrafterError(f"{file.path.name}: tensor {unknown[0]!r} of the module that drafts is not known")
    one = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0, "num_mtp_layers": 0}
    single = type(config).from_dict({**config.to_dict(), **one, "tie_word_embeddings": False})
    own = replace(file, tensors={name: tensor for name, tensor in layer.items() if ".nextn." not in name})
    try:
        model = load_gguf(own, single, torch.float32, "eager", in_blocks=True, whole=False)
        found = {f"{prefix}{name}": value for name, value in layer_weights(decoder_layers(model)[0]).items()}
        for ours, theirs in outside.items():
            if theirs in file.tensors:
                tensor = _as_transformers_has_it(file.tensors[theirs], theirs, config, architecture_of(file))
                blocks, given = ours == HEAD and tensor.kind not in PLAIN, (tensor.data, tensor.kind, torch.float32)
                found[ours] = kept(*given)[0] if blocks else dense(tensor, torch.float32)
    except (NotImplementedError, ValueError, RuntimeError, StartupError) as error:
        raise DrafterError(f"the module that drafts: {str(error).replace('blk.0.', block)}") from error
    file.give_back()
    return found


FILES[".gguf"] = drafter_in
