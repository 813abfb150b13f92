"""What all tests of this folder share: drafters that ask for further blocks whatever these take."""

import pytest

from drafters import readback


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that saw what a block takes on a loaded machine would draft other trees than the one it is compared
    with."""
    monkeypatch.setattr(readback, "clock_of", lambda device: lambda: 0.0)
