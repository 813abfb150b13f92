import os

import pytest


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for no disk: a process that dies takes nothing along that it had handed to the kernel."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
