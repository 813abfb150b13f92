"""Conditions of a measurement (command, commit, machine, versions), and the report that holds them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from service import __version__
from service.assembly import Assembly
from service.engine.measuring import processor_name
from service.errors import StartupError

_SECRETS = ("--api-keys", "--admin-key", "--api-key")
CHECKOUT = Path(__file__).resolve().parents[1]

Conditions = Mapping[str, str | int]


def conditions_of(assembly: Assembly) -> Conditions:
    """Return the conditions of a measurement on this assembly."""
    device = assembly.target.device
    return {
        **surroundings(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "model": f"{assembly.config.model} {assembly.loaded.dtype_name}",
        "drafter": assembly.drafter_name,
        "numerics": assembly.numerics,
    }


def surroundings() -> Conditions:
    """Return the conditions of any measurement: command, commit, machine, versions, date."""
    return {
        "command": command_line(sys.argv),
        "commit": commit_of(CHECKOUT),
        "machine": processor_name(),
        "cpu_count": os.cpu_count() or 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_report(
    file: Path | None, conditions: Conditions, rows: Sequence[object], summary: Mapping[str, object]
) -> None:
    """Write conditions, rows (JSON values or dataclasses) and summary as one JSON object; nothing without a file."""
    if file is not None:
        report = {"conditions": conditions, "rows": rows, "summary": summary}
        file.write_text(json.dumps(report, indent=2, default=asdict) + "\n")


def refuse_unwritable(file: Path | None) -> None:
    """Raise StartupError if a report cannot be written there, before anything is measured."""
    if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
        raise StartupError(f"--out {file}: give a file in a folder that exists")


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line without secrets and without the folders of paths."""
    name, *rest = arguments
    program = Path(name)
    shown = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    for before, argument in zip([name, *rest], rest, strict=False):
        flag, is_assignment, value = argument.partition("=")
        if is_assignment and flag.startswith("--"):
            shown.append(f"{flag}={'***' if flag in _SECRETS else _without_folders(value)}")
        else:
            shown.append("***" if before in _SECRETS else _without_folders(argument))
    return shlex.join(shown)


def _without_folders(argument: str) -> str:
    """Return an argument with only the last part of each path, also in lists and after `=`."""
    return "".join(part if part in ",=" else _without_folder(part) for part in re.split("([,=])", argument))


def _without_folder(part: str) -> str:
    """Return the last part of a path. A hub id has one slash and no leading dot, and stays."""
    is_path = part.startswith(("/", ".", "~")) or part.count("/") > 1
    return Path(part).name if is_path else part


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with `-modified` if files differ from it; without a checkout, the version."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return f"v{__version__}"
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}-modified" if _git(folder, "status", "--porcelain") else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"v{__version__}"
