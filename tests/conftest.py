"""What every test starts from: the same random numbers, the same examples, no variable of ours set."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import settings

# Triton decides when it is imported, which torch may do at any time, whether kernels are compiled or interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A time limit per example would fail on a busy machine and say nothing about the code.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ADAPTREE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
