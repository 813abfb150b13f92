"""Numbers that need not be known in the step they belong to."""

from collections.abc import Sequence

import pytest
import torch

from drafters.readback import Readback, clock_of, readback_of


def heard(readings: Readback, steps: int) -> list[list[float]]:
    """What has been reported by the end of each step, of which each one asks for its own number."""
    reported: list[float] = []

    def observe(values: Sequence[float]) -> None:
        reported.extend(values)

    found = []
    for number in range(steps):
        readings.read(torch.tensor([number]), observe)
        found.append(list(reported))
    return found


def test_a_cpu_answers_at_once() -> None:
    assert heard(readback_of("cpu"), 3) == [[0], [0, 1], [0, 1, 2]]


def test_a_device_answers_a_step_late() -> None:
    assert heard(readback_of("cuda"), 3) == [[], [0], [0, 1]]


def test_what_is_reported_is_what_was_asked_for() -> None:
    reported: list[float] = []
    values, readings = torch.tensor([3.0]), Readback(late=True)
    for _ in range(2):
        readings.read(values, reported.extend)
        values.zero_()
    assert reported == [3.0]


@pytest.mark.gpu
def test_seconds_and_numbers_of_a_device_come_without_waiting() -> None:
    clock, readings = clock_of("cuda"), readback_of("cuda")
    reported: list[float] = []
    began = clock()
    torch.cuda._sleep(100_000_000)  # cycles
    values = torch.full((1,), 7.0, device="cuda")
    ended = clock()
    readings.read(values, reported.extend)
    assert not reported
    readings.read(values + 1, reported.extend)
    assert reported == [7.0]
    assert ended - began > 0.01
