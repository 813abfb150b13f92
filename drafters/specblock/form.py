"""What one published form of a drafter is."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from drafters.specblock.checkpoint import TargetParts
from drafters.specblock.model import SpecBlockConfig


class Form(NamedTuple):
    """`config` and `weights` raise KeyError for what is missing and ValueError for what cannot be."""

    kind: str  # of `TRAINED_KINDS`
    recognises: Callable[[Mapping[str, Any]], bool]  # by the content of config.json
    reads: Callable[[str], bool]  # which tensors are the drafter's, by name
    config: Callable[[Mapping[str, Any], Mapping[str, Tensor], TargetParts], SpecBlockConfig]
    """Of the content of config.json, the tensors and the target."""
    weights: Callable[[dict[str, Tensor], SpecBlockConfig, TargetParts], dict[str, Tensor]]
    """By the names of `checkpoint.weights_of`, without a rank head."""


def renamed(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by our names. # names: ours by theirs, which may be beginnings of several names"""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        begins = max((theirs for theirs in names if name.startswith(theirs)), key=len, default="")
        found[names.get(begins, "") + name.removeprefix(begins)] = tensor
    return found
