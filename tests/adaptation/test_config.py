from pathlib import Path

import pytest
from pydantic import ValidationError

from adaptation.config import AdaptationConfig, free_memory, usable_cores


@pytest.mark.parametrize(
    "wrong",
    [
        {"alhpa": 0.1},
        {"alpha": 0.0},
        {"alpha": float("nan")},
        {"alpha": float("inf")},
        {"policy": "sometimes"},
        {"epsilon": 0.3},
        {"epsilon": (0.1, 0.3)},
        {"epsilon": (1.5, 0.1)},
        {"idle_share": 1.5},
        {"idle_share": -0.1},
        {"enabled": "perhaps"},
        {"train_device": "cuda:x"},
        {"enabled": False, "redis_url": "redis://localhost"},  # and no one would learn, nor share
        {"redis_secret": "too short"},
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AdaptationConfig.model_validate(wrong)


def test_what_opens_the_shared_server_is_not_shown() -> None:
    config = AdaptationConfig.model_validate(
        {"enabled": True, "redis_url": "redis://:password@localhost", "redis_secret": "a secret of all replicas"}
    )
    shown = f"{config!r} {config.model_dump_json()}"
    assert "password" not in shown
    assert "a secret" not in shown


@pytest.mark.parametrize(
    ("line", "files", "cores"),
    [
        ("0::/app", {"app/cpu.max": "50000 100000"}, 1),
        ("4:cpu:/app", {"cpu/app/cpu.cfs_quota_us": "90000", "cpu/app/cpu.cfs_period_us": "100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/gone", {}, None),
    ],
)
def test_threads_are_no_more_than_the_control_group_may_use(
    line: str, files: dict[str, str], cores: int | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    (tmp_path / "mine").write_text(f"{line}\n")
    without = usable_cores(tmp_path, tmp_path / "none")
    assert usable_cores(tmp_path, tmp_path / "mine") == (cores or without)


def test_cached_files_of_a_container_are_free_memory(tmp_path: Path) -> None:
    for name, text in {"max": "1000\n", "current": "900\n", "stat": "anon 200\ninactive_file 600\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(tmp_path) == 1000 - 300
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) > 1000
