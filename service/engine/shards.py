"""The part of a model that one of several devices has: whole heads of attention with what keys and values they read,
columns of the feed-forward, whole experts, and rows of the output layer. Norms, routers, and biases that are added
once, are on all devices; the embedding is on the first one only, which sends looked-up rows to the others.

Where parts end is defined in `kernels.pieces`, so that 1, 2, 4 or 8 devices compute the same bits.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from drafters.network.checkpoint import even_sample, even_sample_of
from kernels.experts import QuantisedStack
from kernels.families import FAMILIES, spec_of
from kernels.layers import COLUMNS, QuantisedWeight, Weight, rows_of
from kernels.pieces import NUM_PIECES, TensorShard, pieces_of
from kernels.specs import AttentionSpec, LayerSpec, ModelSpec
from service.engine.checks import OF_AN_EXPERT, refuse_incomplete, refuse_odd_tensors
from service.engine.modules import EXPERT_WEIGHTS, STACKS, QuantisedLinear, empty_model, matrix_of, weights_of
from service.errors import StartupError

SAMPLES = 64
"""Values of a weight that its fingerprint samples, at least."""
_FILES = "model*.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Range = tuple[int, tuple[slice, ...]]
"""A dimension of a weight, and the ranges of it that a device has."""


class Columns(NamedTuple):
    """Columns of a dense feed-forward."""

    own: slice
    total: int  # number of all


class LayerShard(NamedTuple):
    """The part of a layer that a device has."""

    spec: AttentionSpec  # of the whole layer
    own: slice  # query heads whose output the device projects
    groups: slice  # key heads that these read
    inner: Mapping[str, Columns]  # of each dense feed-forward, by its module
    experts: slice | None  # None: the layer has none

    @staticmethod
    def of(
        spec: AttentionSpec, shapes: Mapping[str, tuple[int, ...]], units: Mapping[str, int], shard: TensorShard
    ) -> "LayerShard":
        """`shapes`: of the layer's weights; `units`: numbers of their columns that cannot be parted."""
        output = shapes["self_attn.o_proj.weight"][1]
        span = shard.span(pieces_of(output, lcm(spec.dim, units["self_attn.o_proj.weight"])))
        own = slice(span.start // spec.dim, span.stop // spec.dim)
        each = spec.query_heads // spec.kv_heads
        inner, experts = dict[str, Columns](), None
        for name, shape in shapes.items():
            if name.endswith("experts.down_proj"):
                experts = shard.span(pieces_of(shape[0], 1))
            elif name.endswith(_DOWN):
                inner[name.removesuffix(_DOWN)] = Columns(shard.span(pieces_of(shape[1], units[name])), shape[1])
        return LayerShard(spec, own, slice(own.start // each, -(-own.stop // each)), inner, experts)

    @property
    def lacks_some(self) -> bool:
        """Whether the device has no part of something."""
        parts = [self.own, *(columns.own for columns in self.inner.values()), *filter(None, [self.experts])]
        return any(part.start == part.stop for part in parts)

    @property
    def queries(self) -> slice:
        """Query heads of `groups`, which the device computes."""
        each = self.spec.query_heads // self.spec.kv_heads
        return slice(self.groups.start * each, self.groups.stop * each)

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the device's heads."""
        first, count = self.queries.start, self.queries.stop - self.queries.start
        kv_heads, own = self.groups.stop - self.groups.start, (self.own.start - first, self.own.stop - first)
        return replace(self.spec, query_heads=count, kv_heads=kv_heads, own=own)

    def range_of(self, name: str) -> Range | None:
        """The part of the layer's weight with this name that the device has; None: all of it."""
        dim, (module, _, kind) = self.spec.dim, name.rpartition(".")
        queries, keys = (slice(part.start * dim, part.stop * dim) for part in (self.queries, self.groups))
        all_queries, all_keys = self.spec.query_heads * dim, self.spec.kv_heads * dim
        rows = {
            "self_attn.q_proj": (queries,),
            "self_attn.k_proj": (keys,),
            "self_attn.v_proj": (keys,),
            "self_attn.qkv_proj": (queries, _moved(keys, all_queries), _moved(keys, all_queries + all_keys)),
        }
        for place, (own, total) in self.inner.items():
            rows |= {f"{place}.gate_proj": (own,), f"{place}.up_proj": (own,)}
            rows[f"{place}.gate_up_proj"] = own, _moved(own, total)
        if name == "self_attn.o_proj.weight":
            return 1, (slice(self.own.start * dim, self.own.stop * dim),)
        if name.endswith(_DOWN):
            return 1, (self.inner[name.removesuffix(_DOWN)].own,)
        if self.experts is not None and kind in EXPERT_WEIGHTS:
            return 0, (self.experts,)
        if name == "self_attn.sinks":
            return 0, (self.queries,)
        return (0, rows[module]) if module in rows else None


_DOWN = ".down_proj.weight"


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


@dataclass(slots=True)
class ModelShard:
    """The part of a model that a device has, and what its loader notes of the whole weights."""

    shard: TensorShard
    spec: ModelSpec  # of the whole model
    vocab_size: int
    tied: bool
    layers: list[LayerShard] = field(default_factory=list)  # known once the loader has seen the weights' types
    samples: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    """Shapes of whole weights that the device has in part, and samples of their values."""

    @staticmethod
    def of(config: PreTrainedConfig, shard: TensorShard) -> "ModelShard":
        """The part of a model with this configuration. Raises StartupError for one that devices cannot share."""
        return ModelShard(shard, shared_spec(config, shard.size), config.vocab_size, bool(config.tie_word_embeddings))

    def plan(self, model: PreTrainedModel, unit_of: Callable[[str], int]) -> None:
        """Decide which part of each layer is loaded. `model`: without weights; `unit_of`: number of columns of a weight
        that cannot be parted. Raises StartupError for a model too small for so many devices."""
        for index, own in enumerate(self.spec.layers):
            prefix = f"model.layers.{index}."
            whole = {name: value for name, value in model.named_parameters() if name.startswith(prefix)}
            names = {own.usual(name.removeprefix(prefix)): name for name in whole}
            shapes = {usual: tuple(whole[name].shape) for usual, name in names.items()}
            units = {usual: unit_of(name) for usual, name in names.items()}
            self.layers.append(LayerShard.of(own.attention, shapes, units, self.shard))
        if self.vocab.start == self.vocab.stop or any(layer.lacks_some for layer in self.layers):
            raise StartupError(f"a layer has too few heads, columns or experts for {self.shard.size} devices: {_ONE}")

    @property
    def vocab(self) -> slice:
        """Rows of the output layer that the device has."""
        return self.shard.span(pieces_of(self.vocab_size, COLUMNS))

    @property
    def own_spec(self) -> ModelSpec:
        """The records of the device's layers."""
        parts = zip(self.spec.layers, self.layers, strict=True)
        return replace(self.spec, layers=tuple(replace(whole, mixer=own.attention) for whole, own in parts))

    def range_of(self, name: str) -> Range | None:
        """The part of the weight with this name that the device has; None: all of it."""
        if name == HEAD:
            return 0, (self.vocab,)
        if name == EMBEDDING and self.shard.rank:  # it looks up nothing
            return 0, (self.vocab if self.tied else slice(0, 0),)
        match name.split(".", 3):
            case ["model", "layers", number, rest]:
                return self.layers[int(number)].range_of(self.spec.layers[int(number)].usual(rest))
        return None

    def note(self, name: str, shape: tuple[int, ...], read: Callable[[Tensor], Tensor]) -> None:
        """Note a sample of a whole weight, of which only a part is loaded; see `even_sample`. `read`: reads its rows,
        of all experts one after the other; [rows] int64 -> [rows, ...]."""
        rows = shape if len(shape) < 3 else (shape[0] * shape[1], *shape[2:])
        self.samples[name] = shape, even_sample_of(rows, SAMPLES, read)

    def note_stack(self, name: str, shape: tuple[int, int, int], read: Callable[[int, Tensor], Tensor]) -> None:
        """The same of experts in blocks. `read`: reads rows of an expert, [rows] int64 -> [rows, in]."""
        count = -(-SAMPLES // shape[0])
        values = [even_sample_of(shape[1:], count, partial(read, expert)) for expert in range(shape[0])]
        self.samples[name] = shape, torch.cat(values)

    def part_head(self, model: PreTrainedModel, *, in_blocks: bool = False) -> None:
        """Give a tied output layer its own part of the embedding. `in_blocks`: as in `load_gguf`. Raises StartupError
        for quantised embeddings that cannot be parted."""
        if not self.tied:
            return
        weight = matrix_of(model.get_input_embeddings())
        if self.shard.rank == 0:
            if not isinstance(weight, Tensor) and self.vocab_size % COLUMNS:
                raise StartupError(f"the tied embedding has {self.vocab_size} rows, no whole groups of 32: {_ONE}")
            self.samples[HEAD] = tuple(weight.shape), even_sample(weight, SAMPLES)
            weight = rows_of(weight, torch.arange(self.vocab.start, self.vocab.stop))
        model.set_output_embeddings(_linear(weight, listed=not in_blocks))

    def digest(self) -> str:
        """Hash of what all devices must have noted alike."""
        found = hashlib.sha256()
        for name, (shape, values) in sorted(self.samples.items()):
            if name != EMBEDDING and not (self.tied and name == HEAD):
                found.update(f"{name} {shape}".encode() + values.double().cpu().numpy().tobytes())
        return found.hexdigest()


def shared_spec(config: PreTrainedConfig, size: int) -> ModelSpec:
    """The records of a model that `size` devices share. Raises StartupError if they cannot."""
    kind = config.model_type
    if NUM_PIECES % size:
        raise StartupError(f"tensor_parallel is {size}: a model is shared by 2, 4 or 8 devices")
    if getattr(config, "quantization_config", None):
        raise StartupError(f"devices cannot share MXFP4 in safetensors files: serve a GGUF file of it, or {_ONE}")
    spec = spec_of(config.to_dict()) if kind in FAMILIES else None
    reasons: Mapping[str, Callable[[LayerSpec], object]] = {
        "recurrent layers": lambda layer: not isinstance(layer.mixer, AttentionSpec),
        "norms over all heads": lambda layer: layer.attention.norms == "projection",
        "gates of attention": lambda layer: layer.attention.gated,
        "layers that read the keys and values of others": lambda layer: layer.attention.source is not None,
        "embeddings for each layer": lambda layer: layer.per_layer is not None,
    }
    if spec is None:
        raise StartupError(f"model type {kind!r} runs by its own modules, which devices cannot share: {_ONE}")
    for reason, found in reasons.items():
        if any(map(found, spec.layers)):
            raise StartupError(f"model type {kind!r} has {reason}, which devices cannot share yet: {_ONE}")
    return spec


_ONE = "set tensor_parallel to 1"


def _linear(weight: Weight, *, listed: bool) -> nn.Module:
    """A layer that holds this weight. `listed`: as a parameter, for the fingerprint of one process, which lists a tied
    weight once where others are in blocks. # weight [out, in]"""
    if not isinstance(weight, Tensor):
        return QuantisedLinear(weight, None)
    held = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    del held.weight
    held.weight = nn.Parameter(weight, requires_grad=False) if listed else weight.detach()
    return held


def load_safetensors(
    source: str, revision: str, config: PreTrainedConfig, dtype: torch.dtype, part: ModelShard, names: Mapping[str, str]
) -> PreTrainedModel:
    """Load a device's part of the safetensors files of a folder or of the hub. `names`: patterns in the names of the
    files' tensors, and what the model calls them. Raises StartupError."""
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=[_FILES, "*.json"]))
    refuse_odd_tensors(folder)
    model = empty_model(config, dtype)
    part.plan(model, lambda name: COLUMNS)
    held = {name: value for name, value in model.state_dict().items() if not (part.tied and name == HEAD)}
    others, odd = list[str](), list[tuple[str, object, object]]()
    with ExitStack() as files:
        found = _tensors_in(folder, names, files)
        if part.tied and HEAD in found:
            raise StartupError(
                f"the files contain {HEAD}, but config.json ties it to the embedding: set tie_word_embeddings to "
                f"false, or {_ONE}"
            )
        for name, tensor in found.items():
            shape = tuple(tensor.get_shape())
            if name not in held:
                others.append(name)
            elif shape != tuple(held[name].shape):
                odd.append((name, shape, tuple(held[name].shape)))
            else:
                place, _, own_name = name.rpartition(".")
                value = _read(tensor, part, name, held[name].dtype)
                is_buffer = not held[name].is_meta
                kept = value if is_buffer else nn.Parameter(value, requires_grad=False)
                setattr(model.get_submodule(place), own_name, kept)
    part.part_head(model)
    report = {"missing_keys": held.keys() - found.keys(), "unexpected_keys": others, "mismatched_keys": odd}
    refuse_incomplete(report, config)
    return model


_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}
"""Order of an expert's matrices, by the names that families give them."""


def _tensors_in(folder: Path, names: Mapping[str, str], files: ExitStack) -> dict[str, Any]:
    """Open the files of a folder. Returns their tensors by the names that the model gives them, as slices of
    safetensors; those of experts are stacked."""
    found, experts = dict[str, Any](), dict[str, dict[int, dict[int, Any]]]()
    for file in sorted(folder.glob(_FILES)):
        opened = files.enter_context(safe_open(file, "pt"))
        for key in opened.keys():  # noqa: SIM118 - it is no mapping
            name = reduce(lambda name, pattern: re.sub(pattern, names[pattern], name), names, key)
            one = OF_AN_EXPERT.fullmatch(name)
            kind = "" if one is None else one["kind"].removeprefix(".").removesuffix(".weight")
            if one is None or kind not in _PLACES:
                found[name] = opened.get_slice(key)
            else:
                own = experts.setdefault(one["place"], {}).setdefault(int(one["number"]), {})
                own[_PLACES[kind]] = opened.get_slice(key)
    for place, by_number in experts.items():
        matrices = [[by_number[number][kind] for kind in sorted(by_number[number])] for number in sorted(by_number)]
        found[place + STACKS[0]] = StackedSlices([own[:-1] for own in matrices])
        found[place + STACKS[1]] = StackedSlices([own[-1:] for own in matrices])
    return found


class StackedSlices(NamedTuple):
    """Matrices of experts in a file, as a slice of one tensor [experts, out, in]."""

    matrices: Sequence[Sequence[Any]]  # of each expert, whose rows follow each other

    def get_shape(self) -> list[int]:
        """The sizes of the tensor."""
        shapes = [one.get_shape() for one in self.matrices[0]]
        return [len(self.matrices), sum(shape[0] for shape in shapes), shapes[0][1]]

    def __getitem__(self, where: Any) -> Any:
        """Read experts, or a row of one. # -> [experts, out, in] or [in]"""
        if isinstance(where, slice):
            return torch.stack([torch.cat([one[:] for one in own]) for own in self.matrices[where]])
        expert, row = where
        for one in self.matrices[expert]:
            if row < one.get_shape()[0]:
                return one[row]
            row -= one.get_shape()[0]
        raise IndexError(where)


def _read(tensor: Any, part: ModelShard, name: str, dtype: torch.dtype) -> Tensor:
    """Read the part of a tensor that the device has, in this type. `tensor`: a slice of safetensors."""
    own = part.range_of(name)
    if own is None:
        whole: Tensor = tensor[:].to(dtype)
        return whole
    shape = tuple(tensor.get_shape())

    def lines(numbers: Tensor) -> Tensor:
        places = [divmod(number, shape[1]) if len(shape) == 3 else number for number in numbers.tolist()]
        return torch.stack([tensor[place] for place in places]).to(dtype)

    part.note(name, shape, lines)
    dim, ranges = own
    values = [tensor[one] if dim == 0 else tensor[:, one] for one in ranges]
    return (values[0] if len(values) == 1 else torch.cat(values)).to(dtype)


def weights_fingerprint(
    model: PreTrainedModel, of_whole: Mapping[str, tuple[tuple[int, ...], Tensor]] = MappingProxyType({})
) -> str:
    """Hash the name, shape, dtype and evenly spaced sample values of every parameter. `of_whole`: shapes and samples of
    those that are held in part."""
    digest, weights = hashlib.sha256(), weights_of(model)
    in_blocks = any(isinstance(weight, QuantisedWeight | QuantisedStack) for weight in weights.values())
    for name, weight in sorted((weights if in_blocks else model.state_dict()).items()):
        parts = weight.weights if isinstance(weight, QuantisedStack) else [weight]
        own = tuple(weight.shape), torch.cat([even_sample(part, -(-SAMPLES // len(parts))) for part in parts])
        shape, sample = of_whole.get(name, own)
        values = sample.double().cpu().numpy()  # planned transfer: at start
        digest.update(f"{name} {shape} {weight.dtype}".encode() + values.tobytes())
    return digest.hexdigest()[:16]
