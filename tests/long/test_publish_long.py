"""Twenty thousand publishes in mid-stream."""

import os
from pathlib import Path

import pytest

from tests.e2e.test_publish_exactness import publish_in_mid_stream
from tests.service.learning_parts import assembled

pytestmark = pytest.mark.slow
PUBLISHES = 10_000  # per temperature


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_plain_whatever_is_published(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    publish_in_mid_stream(assembled(tmp_path), tmp_path / "state", temperature, PUBLISHES)
