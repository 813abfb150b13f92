"""Twenty thousand publishes in mid-stream on a tiny model, a thousand of the heads alone on the embedded one."""

import os
from pathlib import Path

import pytest

from drafters.specblock.model import HEADS
from service.assembly import assemble
from service.bench.lossless import built_in_prompts
from service.config import ServiceConfig
from tests.e2e.test_publish_exactness import publish_in_mid_stream
from tests.service.learning_parts import assembled

pytestmark = pytest.mark.slow
PUBLISHES = 10_000  # per temperature
EMBEDDED_PUBLISHES = 1_000
EMBEDDED_SLOTS = 360  # too few for four of its texts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_plain_whatever_is_published(
    tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    publish_in_mid_stream(assembled(tmp_path, "specblock"), tmp_path / "state", temperature, PUBLISHES)


def test_texts_of_the_embedded_model_are_plain_whatever_heads_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    config = ServiceConfig(device="cpu", drafter="specblock", budget_policy="fixed", max_budget=16)
    assembly = assemble(config)
    publish_in_mid_stream(
        assembly,
        tmp_path / "state",
        0.7,
        EMBEDDED_PUBLISHES,
        parts=HEADS,
        prompts=built_in_prompts(assembly.tokenizer),
        slots=EMBEDDED_SLOTS,
    )
