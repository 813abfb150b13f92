"""The file a run continues from: weights, optimizer, and how far it is.

What is random in a run follows from its seed, the step and the epoch alone, so no generator has to be kept. A file is
written under a temporary name first: a kill leaves the one before.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from drafters.training.errors import TrainingError


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run is."""

    step: int = 0
    epoch: int = 0
    place: int = 0  # batches of the epoch that each process has done
    tokens: int = 0
    skipped: int = 0  # steps left out because their gradients were not finite
    skipped_in_a_row: int = 0
    seconds: float = 0.0


def save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    *,
    described: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> None:
    """Plain JSON values: `described`, settings under which alone the run may go on; `notes`, what it remembers."""
    content = {
        "model": model.state_dict(),
        "d2t": model.get_buffer("d2t"),
        "optimizer": optimizer.state_dict(),
        "position": asdict(position),
        "described": dict(described),
        "notes": dict(notes),
    }
    part = path.with_suffix(".part")
    torch.save(content, part)
    part.rename(path)


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, described: Mapping[str, Any]
) -> tuple[Position, dict[str, Any]]:
    """Take up a run: how far it is, and its notes. Raises TrainingError for a damaged file or other settings."""
    content = _read(path)
    before = content["described"]
    changed = [name for name in sorted(before.keys() | described.keys()) if before.get(name) != described.get(name)]
    if changed:
        shown = ", ".join(f"{name} was {before.get(name)!r}, is {described.get(name)!r}" for name in changed[:5])
        raise TrainingError(f"{path}: a run with other settings ({shown}); use the same ones or another folder")
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return Position(**content["position"]), content["notes"]


def vocabulary(path: Path) -> torch.Tensor:
    """The draft tokens of a run, which more data must not change. # -> [draft_vocab] int64"""
    d2t: torch.Tensor = _read(path)["d2t"]
    return d2t


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); delete it to start the run anew") from error
    return content
