"""Tiles are counted on only where oneDNN may use them."""

import pytest
import torch

from service.engine import instructions


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        (None, True),
        ("ALL", True),
        ("default", True),
        ("AVX512_CORE_AMX", True),
        ("avx10_1_512_amx_fp16", True),
        ("AVX512_CORE_FP16", False),
        ("AVX2", False),
    ],
)
def test_a_limit_below_them_counts(limit: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if limit is not None:
        monkeypatch.setenv(instructions.VARIABLE, limit)
    else:
        monkeypatch.delenv(instructions.VARIABLE, raising=False)
    assert instructions.has_tiles.__wrapped__() is allowed


def test_a_cpu_without_them_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert not instructions.has_tiles.__wrapped__()
