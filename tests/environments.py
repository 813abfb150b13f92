"""Programs with requirements of their own, in environments that are made once and kept in build/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_ENVIRONMENTS = Path(__file__).parents[1] / "build" / "environments"
_OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def python_environment(requirements: Path) -> Path:
    """The folder of an environment with what this file asks for."""
    create = [sys.executable, "-m", "venv", "--without-pip", "."]
    pip = [sys.executable, "-m", "pip", "--python", "bin/python", "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-compile", "-r", requirements.name]
    return _made(requirements, create, install)


def node_environment(package: Path) -> Path:
    """The folder with the modules that a package.json asks for."""
    return _made(package, ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"])


def run(command: list[str], folder: Path, *, timeout_seconds: float = 600) -> str:
    """What a program printed, which must not fail."""
    done = subprocess.run(
        command, cwd=folder, env=_OUTSIDE, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _made(requirements: Path, *commands: list[str]) -> Path:
    """Anew where the requirements are others than those it was made of."""
    folder = _ENVIRONMENTS / requirements.stem
    stamp = folder / "made-of"
    if not stamp.exists() or stamp.read_bytes() != requirements.read_bytes():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(requirements, folder)
        for command in commands:
            run(command, folder)
        stamp.write_bytes(requirements.read_bytes())
    return folder
