"""Every kernel compiles for the GPUs it is meant for; what is served in bf16 fits into registers and shared memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

KERNELS = {
    "_linear",
    "_prefix_kernel",
    "_tail_kernel",
    "_best_of_parts",
    "_draw_row",
    "_features_of_row",
    "_walk",
    "_commit",
    "_add_norm",
    "_gate",
    "_grouped",
    "_add_chosen",
    "_rotate_store",
    "_judge",
    "_mark",
    "_correct",
    "_add",
    "_add_rejected",
    "_grow",
    "_learn",
    "_walk_states",
}
SMALLEST_SHARED = 99 * 1024  # bytes a program may have on the smallest of these devices
MOST_SPILLED = 32  # bytes of a thread
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", [80, 89, 90, 100])
def test_kernels_compile(architecture: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-m", "tests.kernels.compile_kernels", str(architecture)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    listing = done.stdout.splitlines()
    assert {line.partition("(")[0] for line in listing} == KERNELS
    for line in (line for line in listing if "*bf16" in line):
        assert int(re.findall(r"STACK:(\d+)", line)[0]) <= MOST_SPILLED
        assert int(re.findall(r"SHARED:(\d+)", line)[0]) <= SMALLEST_SHARED
