"""Seconds of work on a device, as the device counts them, and of work that ends on the host, as a wall clock does."""

import time
from collections.abc import Callable
from statistics import median

import torch


def device_seconds(
    run: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    warm_ups: int = 2,
    before: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds between what a device did before `run` and after it; by the wall on a CPU.

    What `before` asks for ahead of each run is not counted.
    """
    for _ in range(warm_ups):
        run()
    if device.type != "cuda":
        return median(_wall(run, before) for _ in range(repeats))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        before()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in events]
    return median(milliseconds) / 1000


def wall_seconds(run: Callable[[], object], device: torch.device, *, repeats: int, warm_ups: int = 2) -> float:
    """Median seconds until the host may go on with the results."""

    def until_done() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warm_ups):
        until_done()
    return median(_wall(until_done) for _ in range(repeats))


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that a large copy reads and writes: what nothing on this device can beat."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_seconds(lambda: target.copy_(source), device, repeats=5)


def _wall(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    before()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
