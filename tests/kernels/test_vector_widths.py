"""Other tests hold with narrower vectors than this machine's: sums and exponentials are rounded otherwise there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPARING = ("tests/drafters", "tests/service/bench/test_draft_records.py", "tests/service/engine/test_sampling.py")
"""Those that compare floating-point numbers of torch's own operations."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_comparisons_do_not_depend_on_the_width_of_vectors(capability: str) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu", *COMPARING]
    environment = {**outside, "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
