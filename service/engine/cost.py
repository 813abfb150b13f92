"""What a verify costs: seconds by rows and context length, measured on the running machine at start-up."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CostTable:
    """Seconds of one forward on a grid; between its points cost is interpolated, beyond them extended linearly."""

    rows: Tensor  # [row points] float32, rising
    contexts: Tensor  # [context points] float32, rising
    seconds: Tensor  # [context points, row points] float32

    def verify_seconds(self, rows: Tensor, context: float) -> Tensor:
        """Predicted seconds of a forward of so many rows at a mean context length. # [n] -> [n]"""
        low, high, share = _bracket(self.contexts, torch.tensor(context, device=rows.device))
        curve = self.seconds[low] * (1 - share) + self.seconds[high] * share  # [row points]
        curve = curve.cummax(0).values  # extended contexts can bend the curve down, and extended rows below zero
        below, above, part = _bracket(self.rows, rows.to(torch.float32))
        return curve[below] * (1 - part) + curve[above] * part

    def to(self, device: torch.device) -> "CostTable":
        """The same table on the device where budgets are chosen."""
        return CostTable(self.rows.to(device), self.contexts.to(device), self.seconds.to(device))


def _bracket(points: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The grid points around each value and how far along it lies between them (above 1 beyond the last)."""
    if points.shape[0] == 1:
        only = torch.zeros_like(values, dtype=torch.int64)
        return only, only, torch.zeros_like(values)
    above = torch.searchsorted(points, values).clamp(1, points.shape[0] - 1)
    below = above - 1
    share = (values - points[below]) / (points[above] - points[below])
    return below, above, share.clamp(min=0)


def measure(
    run: Callable[[int, int], None], rows: Sequence[int], contexts: Sequence[int], *, repeats: int = 3
) -> CostTable:
    """Time `run(rows, context)` over a grid. The median of a few repeats, made monotonic: a larger forward that
    seems cheaper is noise, and believing it would cost every step."""
    seconds = torch.tensor([[_median_seconds(run, count, context, repeats) for count in rows] for context in contexts])
    return CostTable(
        torch.tensor(rows, dtype=torch.float32),
        torch.tensor(contexts, dtype=torch.float32),
        seconds.cummax(dim=1).values.cummax(dim=0).values,
    )


def _median_seconds(run: Callable[[int, int], None], rows: int, context: int, repeats: int) -> float:
    run(rows, context)
    return statistics.median(_seconds(run, rows, context) for _ in range(repeats))


def _seconds(run: Callable[[int, int], None], rows: int, context: int) -> float:
    start = time.perf_counter()
    run(rows, context)
    return time.perf_counter() - start
