"""The benchmark of a model in several processes runs, and its figures are those of the forwards."""

from pathlib import Path

import pytest

from benchmarks import sharing
from kernels.cpu import library
from service.config import LoadedConfig
from tests.service.bench.parts import save_two_layers, settings_for

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")


def test_forwards_of_one_process_and_of_two_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings_for(save_two_layers(tmp_path / "model", hidden_size=128))
    assert sharing.run(LoadedConfig(config, {}), rounds=3, processes="2", chain=True, out=tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("one process again", "one chain", "2 processes"))
