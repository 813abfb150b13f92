"""Measured costs are kept for the very same machine and model, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.engine.cost import CostTable
from service.engine.cost_cache import CostKey, Costs, cached_or_measured, read, this_machine, write
from service.engine.draft_cost import DraftCosts

KEY = CostKey(
    machine="m x 2", device="cpu", model="abc", drafter="lookup 1", threads=1, rows="4 1", sizes="8 512", version="1"
)
COSTS = Costs(
    CostTable(
        sequences=np.array([1.0, 4.0]),
        contexts=np.array([128.0]),
        rows=np.array([1.0, 8.0]),
        seconds=np.array([[[0.1, 1 / 3]], [[0.2, 0.5]]]),
    ),
    DraftCosts(blocks=np.array([1.0]), batches=np.array([1.0, 4.0]), seconds=np.array([[0.01, 0.02]])),
)


def never() -> Costs:
    raise AssertionError("measured again")


def test_what_was_measured_is_read_again_to_the_bit(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    cached_or_measured(folder, KEY, lambda: COSTS)
    again = cached_or_measured(folder, KEY, never)
    for name in ("sequences", "contexts", "rows", "seconds"):
        assert np.array_equal(getattr(again.verify, name), getattr(COSTS.verify, name))
    assert np.array_equal(again.drafts.seconds, COSTS.drafts.seconds)
    assert [file.name for file in folder.iterdir()] == [KEY.file_name]


OTHERS = {
    "machine": replace(KEY, machine="n x 2"),
    "device": replace(KEY, device="H200"),
    "model": replace(KEY, model="abd"),
    "drafter": replace(KEY, drafter="lookup 2"),
    "threads": replace(KEY, threads=2),
    "rows": replace(KEY, rows="4 8"),
    "sizes": replace(KEY, sizes="8 1024"),
    "version": replace(KEY, version="2"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_key_measures_again(tmp_path: Path, name: str) -> None:
    cached_or_measured(tmp_path, KEY, lambda: COSTS)
    with pytest.raises(AssertionError, match="measured again"):
        cached_or_measured(tmp_path, OTHERS[name], never)


def test_a_file_under_the_wrong_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(KEY, threads=2)
    write(tmp_path / KEY.file_name, other, COSTS)
    assert read(tmp_path / KEY.file_name, KEY) is None
    assert "belong to something else" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "empty", "shape", "nan"])
def test_a_damaged_file_is_measured_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / KEY.file_name
    write(file, KEY, COSTS)
    text = file.read_text()
    file.write_text(
        {
            "cut": text[: len(text) // 2],
            "empty": "",
            "shape": text.replace("[1.0, 8.0]", "[1.0]"),
            "nan": text.replace("0.5", "NaN"),
        }[damage]
    )
    assert read(file, KEY) is None
    assert "cannot be read" in caplog.text
    assert cached_or_measured(tmp_path, KEY, lambda: COSTS) is COSTS
    assert read(file, KEY) is not None


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert cached_or_measured(blocked, KEY, lambda: COSTS) is COSTS
    assert "cannot be kept" in caplog.text


def test_this_machine_has_a_name() -> None:
    assert this_machine() == this_machine()
    assert " x " in this_machine()
