"""The part of a model that one of several devices has: whole heads of attention with what keys and values they read,
columns of the feed-forward, and rows of the output layer. Norms, and biases that are added once, are on all devices;
the embedding is on the first one only, which sends looked-up rows to the others.

Where parts end is defined in `kernels.pieces`, so that 1, 2, 4 or 8 devices compute the same bits.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
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
from service.engine.checks import refuse_incomplete, refuse_odd_tensors
from service.engine.modules import QuantisedLinear, empty_model, matrix_of, weights_of
from service.errors import StartupError

SAMPLES = 64
"""Values of a weight that its fingerprint samples, at least."""
_FILES = "model*.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Range = tuple[int, tuple[slice, ...]]
"""A dimension of a weight, and the ranges of it that a device has."""


class LayerShard(NamedTuple):
    """The part of a layer that a device has."""

    spec: AttentionSpec  # of the whole layer
    own: slice  # query heads whose output the device projects
    groups: slice  # key heads that these read
    inner: slice  # columns of the feed-forward
    inner_columns: int  # of the whole layer

    @staticmethod
    def of(spec: LayerSpec, inner: int, units: tuple[int, int], shard: TensorShard) -> "LayerShard":
        """`inner`: columns of the feed-forward; `units`: numbers of columns that `o_proj` and `down_proj` cannot
        part."""
        whole = spec.attention
        span = shard.span(pieces_of(whole.query_heads * whole.dim, lcm(whole.dim, units[0])))
        own = slice(span.start // whole.dim, span.stop // whole.dim)
        each = whole.query_heads // whole.kv_heads
        groups = slice(own.start // each, -(-own.stop // each))
        return LayerShard(whole, own, groups, shard.span(pieces_of(inner, units[1])), inner)

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
        dim, module = self.spec.dim, name.rpartition(".")[0]
        queries, keys = (slice(part.start * dim, part.stop * dim) for part in (self.queries, self.groups))
        all_queries, all_keys = self.spec.query_heads * dim, self.spec.kv_heads * dim
        rows = {
            "self_attn.q_proj": (queries,),
            "self_attn.k_proj": (keys,),
            "self_attn.v_proj": (keys,),
            "self_attn.qkv_proj": (queries, _moved(keys, all_queries), _moved(keys, all_queries + all_keys)),
            "mlp.gate_proj": (self.inner,),
            "mlp.up_proj": (self.inner,),
            "mlp.gate_up_proj": (self.inner, _moved(self.inner, self.inner_columns)),
        }
        if name == "self_attn.o_proj.weight":
            return 1, (slice(self.own.start * dim, self.own.stop * dim),)
        if name == "mlp.down_proj.weight":
            return 1, (self.inner,)
        if name == "self_attn.sinks":
            return 0, (self.queries,)
        return (0, rows[module]) if module in rows else None


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
            whole = [name for name, _ in model.named_parameters() if name.startswith(prefix)]
            names = {own.usual(name.removeprefix(prefix)): name for name in whole}
            output, down = names["self_attn.o_proj.weight"], names["mlp.down_proj.weight"]
            units, inner = (unit_of(output), unit_of(down)), model.get_parameter(down).shape[1]
            self.layers.append(LayerShard.of(own, inner, units, self.shard))
        parts = [self.vocab, *(part for layer in self.layers for part in (layer.own, layer.inner))]
        if any(part.start == part.stop for part in parts):
            raise StartupError(f"a layer has too few heads or columns for {self.shard.size} devices: {_ONE}")

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
        """Note a sample of a whole weight, of which only a part is loaded; see `even_sample`. `read`: reads rows of it,
        [rows] int64 -> [rows, ...]."""
        self.samples[name] = shape, even_sample_of(shape, SAMPLES, read)

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
    spec = spec_of(config.to_dict()) if kind in FAMILIES else None
    reasons: Mapping[str, Callable[[LayerSpec], object]] = {
        "recurrent layers": lambda layer: not isinstance(layer.mixer, AttentionSpec),
        "experts": lambda layer: layer.feed_forward.router,
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
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    found, others, odd = set[str](), list[str](), list[tuple[str, object, object]]()
    for file in sorted(folder.glob(_FILES)):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                name = reduce(lambda name, pattern: re.sub(pattern, names[pattern], name), names, key)
                tensor = opened.get_slice(key)
                shape = tuple(tensor.get_shape())
                if name == HEAD and part.tied:
                    raise StartupError(
                        f"the files contain {HEAD}, but config.json ties it to the embedding: set tie_word_embeddings "
                        f"to false, or {_ONE}"
                    )
                if name not in shapes:
                    others.append(key)
                elif shape != shapes[name]:
                    odd.append((key, shape, shapes[name]))
                else:
                    found.add(name)
                    place, _, parameter = name.rpartition(".")
                    value = _read(tensor, part, name, model.dtype)
                    setattr(model.get_submodule(place), parameter, nn.Parameter(value, requires_grad=False))
    part.part_head(model)
    missing = shapes.keys() - found - ({HEAD} if part.tied else set())
    refuse_incomplete({"missing_keys": missing, "unexpected_keys": others, "mismatched_keys": odd}, config)
    return model


def _read(tensor: Any, part: ModelShard, name: str, dtype: torch.dtype) -> Tensor:
    """Read the part of a tensor that the device has, in this type. `tensor`: a slice of safetensors."""
    own = part.range_of(name)
    if own is None:
        whole: Tensor = tensor[:].to(dtype)
        return whole
    shape = tuple(tensor.get_shape())
    part.note(name, shape, lambda rows: torch.stack([tensor[row] for row in rows.tolist()]).to(dtype))
    dim, ranges = own
    return torch.cat([tensor[one] if dim == 0 else tensor[:, one] for one in ranges]).to(dtype)


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
