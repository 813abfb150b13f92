"""Programs of the system that tests run. One that is missing fails the test and names the remedy."""

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGE_OF = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "podman": "podman runc aardvark-dns",
}


def program(name: str) -> str:
    """Its path."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed: run `make install`, or `apt-get install {PACKAGE_OF[name]}`")
    return found


def promtool(*arguments: str | Path, given: bytes = b"") -> str:
    """Run it; what it says, if it has nothing to complain of."""
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=60)
    spoken = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, f"promtool {' '.join(command[1:])}:\n{spoken}"
    return spoken
