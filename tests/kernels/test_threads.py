"""Threads are asked for by the thread that computes, all share one team, and no text depends on it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels.cpu.library import threads_in_use, use_threads
from kernels.ops import Ops


@pytest.fixture(autouse=True)
def _one_thread_again() -> Iterator[None]:
    yield
    use_threads(1)


def counts() -> tuple[int, int]:
    """Of the calling thread: its threads, and those of torch."""
    return threads_in_use(), torch.get_num_threads()


def in_another_thread() -> tuple[int, int]:
    found = list[tuple[int, int]]()
    other = threading.Thread(target=lambda: found.append(counts()))
    other.start()
    other.join()
    return found[0]


def test_a_thread_asks_for_itself_alone() -> None:
    use_threads(3)
    assert counts() == (3, 1)
    assert in_another_thread() == (1, 1)


def test_without_compiled_kernels_torch_has_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.library.variant", lambda: None)
    use_threads(3)
    assert counts() == (3, 3)
    assert in_another_thread() == (1, 1)
    use_threads(1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts what Linux tells of a process")
def test_all_threads_share_one_team(compiled: Ops) -> None:
    x, product = torch.randn(7, 512), compiled.plan_linear(torch.randn(900, 512), None)
    alone = product(x)

    def ask(_: int) -> bool:
        use_threads(4)
        return all(torch.equal(product(x), alone) for _ in range(300))

    ask(0)
    before = len(list(Path("/proc/self/task").iterdir()))
    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(ask, range(12)))
        assert len(list(Path("/proc/self/task").iterdir())) == before + 3
