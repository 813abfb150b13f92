"""Drafter files: a folder with `config.json` and `model.safetensors`, with the parameter names of the published
SpecBlock weights (`input_layer.*`, `layers.N.*`, `shift_proj.N`, `norm`, `lm_head`, `rank_head.0 / .2`, `t2d`, `d2t`).
A head that equals the target's rows is not stored. Files that do not fit the target are refused, with a remedy in the
message. The module also gives access to the weights of a drafter by name."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.network.config import DrafterConfig, config_from
from drafters.network.model import SpecBlock
from kernels.layers import Weight, dense

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD_FILE = "README.md"
ARCHITECTURE = "SpecBlock"
VOCABULARY = "d2t"
"""Name of the draft vocabulary among the weights, [draft_vocab] int64 target ids; all others are parameters."""
HEAD = "lm_head.weight"
"""Name of the draft head among the weights; not stored if it is the target's."""
_FORMAT = 1


class DrafterError(ValueError):
    """Raised for a drafter folder that cannot be used; the message gives the reason and, if there is one, the
    remedy."""


@dataclass(frozen=True)
class TargetParts:
    """The target's identity, and those of its weights that drafters use."""

    identity: str  # hash of the target's vocabulary and embedding, see `identity_of`
    table: Weight  # [vocab, hidden], the embedding
    output: Weight | None  # [vocab, hidden], the head; None if it was repacked
    norm: Tensor | None = None  # [hidden], gain of the output norm; None: it is not a plain RMSNorm
    config: Mapping[str, Any] = field(default_factory=dict)  # transformers config of its decoder
    completed: Callable[[Mapping[str, Any]], dict[str, Any]] = dict  # fills in the defaults of such a config

    @cached_property
    def embedding(self) -> Tensor:
        """The token embedding as a dense tensor. # [vocab, hidden]"""
        return dense(self.table)

    @cached_property
    def head(self) -> Tensor | None:
        """The output head as a dense tensor, or None if it was repacked. # [vocab, hidden]"""
        return self.embedding if self.output is self.table else None if self.output is None else dense(self.output)


def even_sample(weight: Weight, count: int) -> Tensor:
    """Take every n-th element in row-major order, with the largest n that gives at least `count` elements, or all
    elements if there are fewer. # -> [elements]"""
    if isinstance(weight, Tensor):
        return weight.detach().reshape(-1)[:: max(1, weight.numel() // count)]
    return even_sample_of(tuple(weight.shape), count, weight.lookup)


def even_sample_of(shape: tuple[int, ...], count: int, read: Callable[[Tensor], Tensor]) -> Tensor:
    """The same of a weight whose rows are read one by one. `read`: rows [rows] int64 -> [rows, ...].
    # -> [elements]"""
    width, places = prod(shape[1:]), torch.arange(0, prod(shape), max(1, prod(shape) // count))
    rows, number = (places // width).unique(return_inverse=True)
    return read(rows).view(len(rows), width)[number, places % width]


def identity_of(embedding: Weight, config: Mapping[str, Any]) -> str:
    """Return a hash that identifies the target: of its decoder sizes, and of the signs in a sample of its embedding, so
    that it is the same for all weight types. # embedding [vocab, hidden]"""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    signs = (even_sample(embedding, 4096).float() > 0).to(torch.uint8).cpu().numpy().tobytes()
    shapes = json.dumps({name: config.get(name) for name in (*names, "model_type")}, sort_keys=True)
    return hashlib.sha256(shapes.encode() + signs).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Description:
    """The content of a drafter's `config.json`."""

    config: DrafterConfig
    target_identity: str | None  # None: not stated
    facts: Mapping[str, Any]
    weights_sha256: str | None  # digest of `model.safetensors`; None: not stated


def save(folder: Path, model: SpecBlock, *, target_identity: str, facts: Mapping[str, Any], own_head: bool) -> None:
    """Write a drafter folder: weights in bf16, and the config with `facts` (data, cost, scores). Without `own_head` the
    head is left out, because it is the target's. # weights [...] each"""
    weights = weights_of(model)
    save_weights(folder, model.config, weights, target_identity=target_identity, facts=facts, own_head=own_head)


def save_weights(
    folder: Path,
    config: DrafterConfig,
    weights: Mapping[str, Tensor],
    *,
    target_identity: str,
    facts: Mapping[str, Any],
    own_head: bool = True,
) -> None:
    """Do the same as `save` for weights by the names of `weights_of`. # weights [...] each"""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_published(name): value.to(torch.bfloat16) for name, value in weights.items() if name != VOCABULARY}
    if not own_head:
        del tensors[HEAD]
    d2t = weights[VOCABULARY]
    tensors["d2t"] = (d2t - torch.arange(d2t.shape[0], device=d2t.device)).to(torch.int32)
    tensors["t2d"] = torch.isin(torch.arange(config.target_vocab_size, device=d2t.device), d2t)
    save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, folder / WEIGHTS_FILE)
    described = {
        "format": _FORMAT,
        "architecture": ARCHITECTURE,
        "target_identity": target_identity,
        "drafter": config.described,
        "facts": dict(facts),
        "weights_sha256": weights_sha256(folder),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 digest of the weights file, in hexadecimal. Raises OSError."""
    with (folder / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: Path, target: TargetParts, *, dtype: torch.dtype, device: torch.device | str) -> SpecBlock:
    """Load a drafter in our own form. Raises DrafterError if it does not fit the target."""
    described = describe(folder)
    if described.target_identity != target.identity:
        raise DrafterError(
            f"drafter {folder}: trained for target {described.target_identity}, but this one is {target.identity}; "
            "train a drafter for it with `adaptree train drafter`, or set drafter to memory"
        )
    weights = read_weights(folder, described.config)
    if HEAD not in weights:  # it equals the target's rows of the draft tokens
        if target.head is None:
            raise DrafterError(f"drafter {folder}: stores no head, and the target's head is repacked")
        weights[HEAD] = target.head[weights[VOCABULARY].to(target.head.device)].cpu()
    model = SpecBlock(described.config)
    write_weights(model, weights)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def describe(folder: Path) -> Description:
    """Read a folder's `config.json`. Raises DrafterError if it is missing or invalid."""
    with refusing(folder, f"{CONFIG_FILE} cannot be read", OSError, ValueError):
        described: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    if not isinstance(described, dict) or described.get("format") != _FORMAT:
        found = described.get("format") if isinstance(described, dict) else None
        raise DrafterError(f"drafter {folder}: format {found!r}, this version reads {_FORMAT}")
    with refusing(folder, f"{CONFIG_FILE} is not a drafter's", KeyError, TypeError, ValueError):
        return Description(
            config_from(described["drafter"]),
            described.get("target_identity"),
            dict(described.get("facts") or {}),
            described.get("weights_sha256"),
        )


def read_weights(folder: Path, config: DrafterConfig) -> dict[str, Tensor]:
    """Read the stored tensors by the names of `weights_of`, in their stored types; a head that is the target's is
    missing. Raises DrafterError for names or shapes [...] that do not fit the config."""
    with refusing(folder, f"{WEIGHTS_FILE} cannot be read", OSError, SafetensorError):
        tensors = load_file(folder / WEIGHTS_FILE)
    with refusing(folder, f"{WEIGHTS_FILE} does not fit its config", ValueError):
        d2t = vocabulary(tensors, config)
    wanted = {name: shape for name, shape in shapes_of(config).items() if name != VOCABULARY}
    published = {_published(name): shape for name, shape in wanted.items()}
    refuse_misfits(folder, tensors, published, may_lack=(HEAD,))
    stored = {name: tensors[_published(name)] for name in wanted if _published(name) in tensors}
    return {**stored, **d2t}


def refuse_misfits(
    folder: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, may_lack: tuple[str, ...]
) -> None:
    """Raise DrafterError unless the tensors have these names and shapes; `may_lack`: prefixes of optional names.
    # tensors [...] each"""
    missing = sorted(name for name in shapes.keys() - tensors.keys() if not name.startswith(may_lack))
    extra = sorted(tensors.keys() - shapes.keys())
    if missing or extra:
        raise DrafterError(f"drafter {folder}: parameters missing: {missing or 'none'}, unknown: {extra or 'none'}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            found, needed = tuple(tensor.shape), shapes[name]
            raise DrafterError(f"drafter {folder}: {name} has shape {found}, the config asks for {needed}")


def shapes_of(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a drafter's tensors by the names of `weights_of`, without allocating any."""
    with torch.device("meta"):
        model = SpecBlock(config)
    return {name: tuple(value.shape) for name, value in weights_of(model).items()}


@contextmanager
def refusing(folder: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    """Convert errors of these types to a DrafterError. `what`: what is wrong with the folder, for the message."""
    try:
        yield
    except errors as error:
        raise DrafterError(f"drafter {folder}: {what}: {error}") from error


def vocabulary(tensors: dict[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Remove the draft vocabulary from a file's tensors, and return it as a weight. `d2t` stores target ids minus draft
    ids; without it, every token can be drafted. Raises ValueError for an invalid `d2t`. # -> [draft_vocab] int64"""
    tensors.pop("t2d", None)
    tokens = torch.arange(config.draft_vocab_size)
    zeros = torch.zeros(len(tokens) if len(tokens) == config.target_vocab_size else 0)
    distances = tensors.pop("d2t", zeros)
    if distances.shape != tokens.shape:
        raise ValueError(f"its d2t must list {len(tokens)} tokens, and lists {distances.numel()}")
    d2t = tokens + distances.long()
    if not names_tokens(d2t, config.target_vocab_size):
        raise ValueError("its d2t names tokens that the target does not have, or one twice")
    return {VOCABULARY: d2t}


def _published(name: str) -> str:
    """Return the name that a parameter has in files."""
    return name.removeprefix("decoder.")


def weights_of(model: SpecBlock) -> dict[str, Tensor]:
    """Return all parameters and the vocabulary by name, not copied. # [...] each"""
    return {name: value.detach() for name, value in model.named_parameters()} | {VOCABULARY: model.d2t}


def names_tokens(vocabulary: Tensor, target_vocab: int) -> bool:
    """Return whether all ids are distinct tokens of the target. # vocabulary [draft_vocab] int64"""
    inside = (vocabulary >= 0) & (vocabulary < target_vocab)
    return bool(inside.all()) and vocabulary.unique().shape == vocabulary.shape


@torch.no_grad()
def write_weights(model: SpecBlock, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights into the model, from any type and device. # weights [...] each, by the names of `weights_of`"""
    for name, value in model.named_parameters():
        value.copy_(weights[name])
    model.set_vocabulary(weights[VOCABULARY].to(model.d2t.device))
