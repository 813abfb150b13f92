"""Loads and writes drafter folders, in this project's own form and in the published forms of other projects. A
published drafter without a rank head gets one that returns the rank classes of the draft distribution until it is
trained."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.network import checkpoint
from drafters.network.checkpoint import CONFIG_FILE, DrafterError, TargetParts
from drafters.network.config import DrafterConfig
from drafters.network.form import Described, PublishedForm, Tensors, layers_of, named, taps_of
from drafters.network.model import SpecBlock
from drafters.trained_kinds import published_forms, why_unknown

_RANK_HEAD = ("rank_head.", "rank_norm.")
_LAST_OF_RANKS = "rank_head.2."


class DrafterInFile(NamedTuple):
    """A drafter in a file of its target. Functions here that take a drafter's folder take such a file, too."""

    described: Described  # what `config.json` of the target says; empty: the file has no drafter
    tensors: Callable[[str], dict[str, Any]]
    """Reads the tensors by the names that a published form gives them, which begin with the argument, and those of the
    target. Matrices that the file has in quantised blocks are `QuantisedWeight`, or `QuantisedStack` of experts."""


FILES: dict[str, Callable[[Path], DrafterInFile]] = {}
"""Functions that open files with a drafter, by suffix. The server enters those whose formats it reads."""


def form_of(folder: Path) -> PublishedForm | None:
    """Return the published form of a folder's drafter. Returns None if the form is our own, unknown or unreadable."""
    try:
        described = _described(folder)
        found = (form for form in published_forms() if form.recognises(described))
        return next((form for form in found if _holds(folder, form.prefix(described))), None)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None  # loading the folder reports the reason


def _holds(folder: Path, prefix: str) -> bool:
    """Whether a folder's files have a tensor whose name begins so. Not every copy of a target has its drafter. Raises
    OSError, ValueError, KeyError and SafetensorError."""
    index = folder / "model.safetensors.index.json"
    if not prefix or folder.suffix in FILES:
        return True
    if index.is_file():
        return any(name.startswith(prefix) for name in json.loads(index.read_text())["weight_map"])
    names = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            names |= {*stored.keys()}
    return any(name.startswith(prefix) for name in names)


def kind_of(folder: Path) -> str:
    """Return the name of the kind of a folder's drafter. Raises DrafterError if its config cannot be read."""
    form = form_of(folder)
    if form is not None:
        return form.kind(_described(folder))
    _refuse_unknown(folder)
    return checkpoint.describe(folder).config.kind


def load(folder: Path, target: TargetParts, *, dtype: torch.dtype, device: torch.device | str) -> SpecBlock:
    """Load a folder's drafter, in our own or a published form. Raises DrafterError if it does not fit the target."""
    if form_of(folder) is None:
        _refuse_unknown(folder)
        return checkpoint.load(folder, target, dtype=dtype, device=device)
    config, weights = _fitting(folder, target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for the random initial weights of the rank head
        model = SpecBlock(config)
    own = checkpoint.weights_of(model)
    untrained = {name: torch.zeros_like(value) for name, value in own.items() if name.startswith(_LAST_OF_RANKS)}
    checkpoint.write_weights(model, {**own, **untrained, **{name: _dense(value) for name, value in weights.items()}})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def load_blocks(file: Path, target: TargetParts, *, dtype: torch.dtype) -> tuple[DrafterConfig, dict[str, Any]]:
    """Load the config and the weights of a drafter in a file, to serve it on a CPU: quantised blocks stay, and the head
    is the target's. Raises DrafterError if it does not fit the target."""
    config, weights = _fitting(file, target)
    shapes = {name: shape for name, shape in checkpoint.shapes_of(config).items() if name.startswith(_RANK_HEAD)}
    weights |= {name: (torch.ones if "norm" in name else torch.zeros)(shape) for name, shape in shapes.items()}
    weights |= {} if target.output is None else {checkpoint.HEAD: target.output}
    floats = {name: value for name, value in weights.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return config, weights | {name: value.to(dtype) for name, value in floats.items()}


def _fitting(folder: Path, target: TargetParts) -> tuple[DrafterConfig, dict[str, Any]]:
    """Return the config and the weights, without a rank head, of a drafter in a published form."""
    form = form_of(folder)
    assert form is not None, "its own form is read elsewhere"
    config, weights = _converted(folder, form, read_tensors(folder, form), target)
    checkpoint.refuse_misfits(folder, weights, checkpoint.shapes_of(config), may_lack=_RANK_HEAD)
    return config, weights


def _dense(weight: Any) -> Tensor:
    """Dequantise a weight. # -> [...]"""
    found: Tensor = weight if isinstance(weight, Tensor) else weight.dense()
    return found


def _converted(
    folder: Path, form: PublishedForm, tensors: Tensors, target: TargetParts
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    with checkpoint.refusing(folder, f"is no {form.name} drafter for this target", KeyError, ValueError):
        config = form.config(_described(folder), tensors, target)
        return config, form.weights(dict(tensors), config, target)


def config_of(folder: Path, target: TargetParts) -> DrafterConfig:
    """Return the config of a folder's drafter. Raises DrafterError if it does not fit the target's sizes. Reads only
    `config` and `completed` of the target."""
    form = form_of(folder)
    if form is None:
        _refuse_unknown(folder)
        config = checkpoint.describe(folder).config
    with checkpoint.refusing(folder, "is no drafter for this target", KeyError, ValueError):
        if form is not None:
            return form.config(_described(folder), read_tensors(folder, form), target)
        layers_of(config.target, target)
        taps_of(config.tap_layers, target, first=0)
        return config


def names_in_file(folder: Path, target: TargetParts) -> dict[str, str]:
    """Map each weight, by the names of `checkpoint.weights_of`, to the name of the tensor in the folder's files that
    stores it. The vocabulary is left out, and so is a head that is the target's. Raises DrafterError for a form that
    does not store each matrix as a tensor of its own."""
    form = form_of(folder)
    if form is None:
        weights = checkpoint.read_weights(folder, checkpoint.describe(folder).config)
        return {name: name for name in weights if name != checkpoint.VOCABULARY}
    tensors = read_tensors(folder, form)
    stored = {(value.data_ptr(), value.numel()): name for name, value in tensors.items()}
    _, weights = _converted(folder, form, tensors, target)
    found = {name: stored.get((value.data_ptr(), value.numel())) for name, value in weights.items()}
    if any(found[name] is None and value.dim() > 1 for name, value in weights.items() if name != checkpoint.HEAD):
        raise DrafterError(f"drafter {folder}: the form {form.name} can be served, but not written")
    return {ours: theirs for ours, theirs in found.items() if theirs is not None}


def write_like(folder: Path, out: Path, target: TargetParts) -> None:
    """Rewrite `out`, a trained drafter in our own form, in the form of `folder`, from which training started. Files and
    tensors that training does not change are copied from `folder`. Raises DrafterError."""
    form = form_of(folder)
    if form is None:
        return
    tensors, names = read_tensors(folder, form), names_in_file(folder, target)
    for name, value in checkpoint.read_weights(out, checkpoint.describe(out).config).items():
        if name in names:
            before = tensors[names[name]]
            tensors[names[name]] = value.to(before.dtype).reshape(before.shape)
    _save(out, tensors)
    for file in folder.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".index.json", checkpoint.CARD_FILE)):
            shutil.copyfile(file, out / file.name)


def weights_bytes(folder: Path) -> bytes:
    """Return a folder's weights as bytes, for hashing and comparison. Raises OSError and DrafterError."""
    form = form_of(folder)
    if form is None:
        return (folder / checkpoint.WEIGHTS_FILE).read_bytes()
    tensors = sorted((name, _dense(value)) for name, value in read_tensors(folder, form).items())
    return b"".join(name.encode() + value.flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors)


def read_tensors(folder: Path, form: PublishedForm) -> dict[str, Tensor]:
    """Read the drafter's tensors from all .safetensors files, or else from all .bin files, without executing pickled
    code. Raises DrafterError. # -> [...] each"""
    found, described = dict[str, Tensor](), _described(folder)
    if folder.suffix in FILES:
        return FILES[folder.suffix](folder).tensors(form.prefix(described))
    with checkpoint.refusing(folder, "its weights cannot be read", OSError, SafetensorError, RuntimeError):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys() if form.reads(described, name)}  # noqa: SIM118
        for file in [] if found else sorted(folder.glob("*.bin")):
            found |= {name: value for name, value in _unpickled(file).items() if form.reads(described, name)}
    if not found:
        raise DrafterError(f"drafter {folder}: holds no .safetensors or .bin file with its weights")
    return found


def _unpickled(file: Path) -> dict[str, Tensor]:
    """Read a pickle of tensors by name. Raises DrafterError if it contains anything else."""
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DrafterError(f"{file}: holds more than tensors, so it is not read: convert it to .safetensors") from error
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise DrafterError(f"{file}: holds more than tensors by name: convert it to .safetensors")
    return stored


def _described(folder: Path) -> Described:
    """Read a folder's `config.json`. Raises OSError, and ValueError if it is not a JSON object."""
    if folder.suffix in FILES:
        return FILES[folder.suffix](folder).described
    described: Any = json.loads((folder / CONFIG_FILE).read_text())
    if not isinstance(described, dict):
        raise ValueError("not a JSON object")
    return described


def _refuse_unknown(folder: Path) -> None:
    """Raise DrafterError if the folder's drafter is in a form that is not supported."""
    with checkpoint.refusing(folder, f"{CONFIG_FILE} cannot be read", OSError, ValueError):
        described = _described(folder)
    names = named(described)
    for kind, is_moved in (("medusa", "medusa_num_heads" in described), ("parallel", "peagle" in names)):
        if is_moved:
            raise DrafterError(f"drafter {folder}: kind {kind!r} {why_unknown(kind)}")
    if names and "format" not in described:
        read = ", ".join(sorted({form.name for form in published_forms()}))
        raise DrafterError(f"drafter {folder}: {CONFIG_FILE} names {', '.join(names)}, which is none of {read}")


def _save(folder: Path, tensors: Tensors) -> None:
    """Write a folder's tensors. # [...] each"""
    stored = {name: value.contiguous().cpu() for name, value in tensors.items()}  # planned transfer: not while serving
    save_file(stored, folder / checkpoint.WEIGHTS_FILE, {"format": "pt"})  # transformers refuses files without it
