"""The faster type is the one whose best time is the shorter one."""

from itertools import cycle

import pytest
import torch

from adaptation.trainer import bf16_is_faster

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bf16", "fp32", "faster"),
    [
        ([1.0], [2.0], True),
        ([2.0], [1.0], False),
        ([9.0, 1.0], [2.0, 3.0], True),  # one hiccup decides nothing
        ([2.0, 3.0], [9.0, 1.0], False),
    ],
)
def test_the_best_of_several_times_decides(bf16: list[float], fp32: list[float], faster: bool) -> None:
    times = {torch.bfloat16: cycle(bf16), torch.float32: cycle(fp32)}
    assert bf16_is_faster(CPU, lambda dtype: next(times[dtype])) is faster


def test_other_devices_than_cpus_are_not_asked() -> None:
    def refuses(dtype: torch.dtype) -> float:
        raise AssertionError("nobody may be asked")

    assert bf16_is_faster(torch.device("cuda"), refuses)


def test_a_cpu_is_asked_in_earnest() -> None:
    asked: list[torch.dtype] = []

    def clocked(dtype: torch.dtype) -> float:
        asked.append(dtype)
        return 1.0

    assert not bf16_is_faster(CPU, clocked)
    assert set(asked) == {torch.bfloat16, torch.float32}
    assert bf16_is_faster(CPU) in (True, False)
