"""The record that defines a kind of trained drafter, in this package or in a plug-in, and its published forms, i.e. the
file formats in which other projects publish such drafters; helpers that forms share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.network.checkpoint import TargetParts
from drafters.network.config import DrafterConfig, Fields

EMBEDDING = "embed_tokens.weight"
"""Usual name of a stored copy of the target's embedding."""

_LAYER_KEYS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias"),
    *("rope_parameters", "num_hidden_layers"),
)
"""Keys of a transformers config that a drafter's layers need."""

Described = Mapping[str, Any]
"""The content of a `config.json`."""
Tensors = Mapping[str, Tensor]
"""The tensors of a drafter's files by name."""


class PublishedForm(NamedTuple):
    """A published form: functions that convert a drafter's files to our config and weights. `config` and `weights`
    raise KeyError for missing values and ValueError for unsupported ones."""

    name: str
    recognises: Callable[[Described], bool]  # whether a config is of this form
    kind: Callable[[Described], str]  # name of the drafter's kind
    config: Callable[[Described, Tensors, TargetParts], DrafterConfig]
    weights: Callable[[dict[str, Tensor], DrafterConfig, TargetParts], dict[str, Tensor]]
    """Converts the tensors to weights by the names of `checkpoint.weights_of`; the rank head may be missing."""
    prefix: Callable[[Described], str] = lambda described: ""  # of the names of the drafter's own tensors
    shared: tuple[str, ...] = ()  # names of tensors of the target that the drafter has too

    def reads(self, described: Described, name: str) -> bool:
        """Whether the drafter has the tensor of this name in its folder."""
        return name.startswith(self.prefix(described)) or name in self.shared


class TrainedKind(NamedTuple):
    """A kind of trained drafter: its config class, the default shape for training, and its published forms."""

    config: type[DrafterConfig]
    shape: Fields  # fields of `config.json` in which drafters trained here differ from the defaults
    forms: tuple[PublishedForm, ...] = ()  # file formats of other projects for this kind


def named(described: Described) -> tuple[str, ...]:
    """Return the names by which a config states its form: `speculators_model_type`, or else `architectures`."""
    model_type = described.get("speculators_model_type")
    return (str(model_type),) if model_type else tuple(map(str, described.get("architectures") or ()))


def renamed(tensors: Tensors, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors by our names. `names` maps prefixes of their names to ours; the longest match applies. # [...]
    each"""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        prefix = max((theirs for theirs in names if name.startswith(theirs)), key=len, default="")
        found[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return found


def layers_of(described: Described, target: TargetParts) -> dict[str, Any]:
    """Return the config of a drafter's layers, completed by the defaults of its model type. Raises ValueError if its
    hidden size or vocabulary differs from the target's, or for layers without full attention."""
    found = target.completed(described)
    for name in ("hidden_size", "vocab_size"):
        if found[name] != target.config[name]:
            raise ValueError(f"its {name} is {found[name]}, the target's is {target.config[name]}")
    if set(found.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("its config sets layer_types other than full_attention, which are not supported")
    return {key: found[key] for key in _LAYER_KEYS if found.get(key) is not None}


TRAINED_LENGTH = "trained_length"
"""Key, of this project only, for the longest context seen in training."""


def refuse_set(described: Described, keys: Sequence[str], hidden_size: int | None = None) -> None:
    """Raise ValueError if a config sets one of these keys to a value other than a false one or `hidden_size`."""
    for key in keys:
        if described.get(key) and described[key] != hidden_size:
            raise ValueError(f"its config sets {key}, which is not supported")


def taps_of(counted: Sequence[int], target: TargetParts, *, first: int) -> tuple[int, ...]:
    """Return the tapped layers, counted from 0. `first`: the number of the first layer's output in `counted`. Raises
    ValueError for a layer that the target lacks."""
    depth = target.config["num_hidden_layers"]
    taps = tuple(number - first for number in counted)
    if not all(0 <= tap < depth for tap in taps):
        raise ValueError(f"it taps layers {', '.join(map(str, counted))}, and the target has {depth}")
    return taps


def drop_embedding(tensors: dict[str, Tensor], target: TargetParts, name: str = EMBEDDING) -> None:
    """Remove a stored embedding from a file's tensors. Raises ValueError if it differs, in bf16, from the target's."""
    own = tensors.pop(name, None)
    other = target.embedding.cpu()  # planned transfer: at the start
    if own is not None and not (own.shape == other.shape and torch.equal(own.bfloat16(), other.bfloat16())):
        raise ValueError(f"its {name} is not the target's")
