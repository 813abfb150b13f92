"""Drafters in the form in which their authors publish them, read where they lie: each form says by which `config.json`
it is known, what its numbers are in `SpecBlockConfig`, and how its tensors are called here. A rank head they have not:
it is added, and says what the draft itself says of ranks until it has been taught."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.eagle3.published import EAGLE3_FORM
from drafters.medusa.published import MEDUSA_FORM
from drafters.mtp.published import MTP_FORM
from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import CONFIG_FILE, DrafterError, TargetParts
from drafters.specblock.form import Form
from drafters.specblock.model import SpecBlock

FORMS = (MTP_FORM, EAGLE3_FORM, MEDUSA_FORM)

_RANK_HEAD = ("rank_head.", "rank_norm.")
_LAST_OF_RANKS = "rank_head.2."


def form_of(folder: Path) -> Form | None:
    """None: it is this package's own, or none that is known."""
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None  # whoever loads it says why
    return next((form for form in FORMS if form.recognises(described)), None) if isinstance(described, dict) else None


def kind_of(folder: Path) -> str:
    """Raises DrafterError."""
    form = form_of(folder)
    return checkpoint.read_config(folder).kind if form is None else form.kind


def load(folder: Path, target: TargetParts, *, dtype: torch.dtype, device: torch.device | str) -> SpecBlock:
    """The drafter of a folder for this target, whatever form it has. Raises DrafterError."""
    form = form_of(folder)
    if form is None:
        return checkpoint.load(folder, target, dtype=dtype, device=device)
    described: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    tensors = read_tensors(folder, form)
    with checkpoint.refusing(folder, f"is no drafter of kind {form.kind} for this target", KeyError, ValueError):
        config = form.config(described, tensors, target)
        weights = form.weights(tensors, config, target)
    checkpoint.refuse_misfits(folder, weights, checkpoint.shapes_of(config), may_lack=_RANK_HEAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of what a rank head begins with
        model = SpecBlock(config)
    own = checkpoint.weights_of(model)
    untaught = {name: torch.zeros_like(value) for name, value in own.items() if name.startswith(_LAST_OF_RANKS)}
    checkpoint.write_weights(model, {**own, **untaught, **weights})
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def weights_bytes(folder: Path) -> bytes:
    """What two folders with the same weights have in common. Raises OSError and DrafterError."""
    form = form_of(folder)
    if form is None:
        return (folder / checkpoint.WEIGHTS_FILE).read_bytes()
    tensors = sorted(read_tensors(folder, form).items())
    return b"".join(name.encode() + value.flatten().view(torch.uint8).numpy().tobytes() for name, value in tensors)


def read_tensors(folder: Path, form: Form) -> dict[str, Tensor]:
    """Those of a form, from one file or several. Raises DrafterError."""
    found = dict[str, Tensor]()
    with checkpoint.refusing(folder, "its weights cannot be read", OSError, SafetensorError):
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_tensor(name) for name in stored.keys() if form.reads(name)}  # noqa: SIM118
    if not found:
        raise DrafterError(f"drafter {folder}: holds no .safetensors file with its weights; convert others to it")
    return found
