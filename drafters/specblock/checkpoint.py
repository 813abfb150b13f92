"""Drafter files: a folder with `config.json` and `model.safetensors`, whose parameter names are those of the published
SpecBlock weights (`input_layer.*`, `layers.N.*`, `shift_proj.N`, `norm`, `lm_head`, `rank_head.0 / .2`, `t2d`, `d2t`).
A head that is the target's own, row by row, is not stored again. Whatever does not fit the target is refused with
what to do, and nothing loaded in part. Also the weights of a drafter by name, to be compared, sent and written back."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters.specblock.model import SpecBlock, SpecBlockConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
VOCABULARY = "d2t"
"""The name of the one that is no parameter: [draft_vocab] int64, target ids."""
_FORMAT = 1


class DrafterError(ValueError):
    """A drafter file that cannot be used, and what to do about it."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a drafter borrows from its target, and how it knows that it is the right one."""

    identity: str  # hash of the target's vocabulary and embedding, see `identity_of`
    embedding: Tensor  # [vocab, hidden]
    head: Tensor | None  # [vocab, hidden]; None where it is no longer held in this form


def identity_of(embedding: Tensor, config: Mapping[str, Any]) -> str:
    """A hash of the target that does not depend on the type its weights are held in: shapes of its decoder and the sign
    pattern of an even sample of its embedding. # embedding [vocab, hidden]"""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    flat = embedding.detach().reshape(-1)
    signs = (flat[:: max(1, flat.numel() // 4096)].float() > 0).to(torch.uint8).cpu().numpy().tobytes()
    shapes = json.dumps({name: config.get(name) for name in (*names, "model_type")}, sort_keys=True)
    return hashlib.sha256(shapes.encode() + signs).hexdigest()[:16]


def save(folder: Path, model: SpecBlock, *, target_identity: str, facts: Mapping[str, Any], own_head: bool) -> None:
    """Write weights in bf16 and the config beside them. `facts` are kept as they are: data, cost, scores."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_published(name): value.detach().to(torch.bfloat16) for name, value in model.named_parameters()}
    if not own_head:
        del tensors["lm_head.weight"]
    places = torch.arange(model.d2t.shape[0], device=model.d2t.device)
    tensors["d2t"] = (model.d2t - places).to(torch.int32)
    tensors["t2d"] = model.t2d >= 0
    save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, folder / WEIGHTS_FILE)
    described = {
        "format": _FORMAT,
        "architecture": "SpecBlock",
        "target_identity": target_identity,
        "drafter": asdict(model.config),
        "facts": dict(facts),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path) -> SpecBlockConfig:
    """The drafter's shapes alone, to know which target layers to tap before anything is loaded."""
    return _described(folder)[0]


def load(folder: Path, target: TargetParts, *, dtype: torch.dtype, device: torch.device | str) -> SpecBlock:
    """A drafter for this target."""
    config, expected = _described(folder)
    if expected != target.identity:
        raise DrafterError(
            f"drafter {folder}: trained for target {expected}, but this one is {target.identity}; "
            "train a drafter for it with `adaptree train drafter`, or set drafter to lookup"
        )
    with _refusing(folder, f"{WEIGHTS_FILE} cannot be read", OSError, SafetensorError):
        tensors = load_file(folder / WEIGHTS_FILE)
    model = SpecBlock(config)
    model.set_vocabulary(_vocabulary(tensors, config, folder))
    if "lm_head.weight" not in tensors:  # it is the target's output rows of the draft tokens
        if target.head is None:
            raise DrafterError(f"drafter {folder}: stores no head, and the target's own is not held unpacked")
        tensors["lm_head.weight"] = target.head[model.d2t.to(target.head.device)].cpu()
    _fill(model, tensors, folder)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _described(folder: Path) -> tuple[SpecBlockConfig, str | None]:
    """The drafter's config and its target's identity."""
    with _refusing(folder, f"{CONFIG_FILE} cannot be read", OSError, ValueError):
        described: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    if described.get("format") != _FORMAT:
        raise DrafterError(f"drafter {folder}: format {described.get('format')!r}, this version reads {_FORMAT}")
    with _refusing(folder, f"{CONFIG_FILE} is not a drafter's", KeyError, TypeError, ValueError):
        return SpecBlockConfig.from_mapping(described["drafter"]), described.get("target_identity")


@contextmanager
def _refusing(folder: Path, what: str, *errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        raise DrafterError(f"drafter {folder}: {what}: {error}") from error


def _vocabulary(tensors: dict[str, Tensor], config: SpecBlockConfig, folder: Path) -> Tensor:
    """Target ids of the draft tokens; the file holds their distances. # -> [draft_vocab] int64"""
    distances = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    if distances is None or distances.shape != (config.draft_vocab_size,):
        raise DrafterError(f"drafter {folder}: d2t must list {config.draft_vocab_size} tokens")
    d2t = distances.long() + torch.arange(config.draft_vocab_size)
    if not names_tokens(d2t, config.target_vocab_size):
        raise DrafterError(f"drafter {folder}: d2t names tokens that the target does not have, or one twice")
    return d2t


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    wanted = {_published(name): parameter for name, parameter in model.named_parameters()}
    missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or extra:
        raise DrafterError(f"drafter {folder}: parameters missing: {missing or 'none'}, unknown: {extra or 'none'}")
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            found, needed = tuple(tensors[name].shape), tuple(parameter.shape)
            raise DrafterError(f"drafter {folder}: {name} has shape {found}, the config asks for {needed}")
        with torch.no_grad():
            parameter.copy_(tensors[name])


def _published(name: str) -> str:
    """The published name of one of our parameters."""
    return name.removeprefix("decoder.")


def weights_of(model: SpecBlock) -> dict[str, Tensor]:
    """The tensors themselves, by name."""
    return {name: value.detach() for name, value in model.named_parameters()} | {VOCABULARY: model.d2t}


def names_tokens(vocabulary: Tensor, target_vocab: int) -> bool:
    """Whether every entry is one of the target's tokens, and none is there twice."""
    inside = (vocabulary >= 0) & (vocabulary < target_vocab)
    return bool(inside.all()) and vocabulary.unique().shape == vocabulary.shape


@torch.no_grad()
def write_weights(model: SpecBlock, weights: Mapping[str, Tensor]) -> None:
    """In place, all of them, whatever type and device they come in."""
    for name, value in model.named_parameters():
        value.copy_(weights[name])
    model.set_vocabulary(weights[VOCABULARY].to(model.d2t.device))
