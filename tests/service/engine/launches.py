"""Counts what a device would be asked for one by one: operations on tensors that are no views, replayed captures apart,
our kernels as the launches that they are. Sorts and their like are several on a device, so the count is a lower
bound."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafters.readback import Readback
from kernels.graph_runner import rerun
from kernels.ops import REFERENCE, Ops

_FREE = ("aten.empty", "aten.new_empty", "aten._local_scalar_dense", "aten.lift_fresh", "aten.detach")
_DEVICE_LAUNCHES = {"sample": 8, "rank_features": 1, "grow_joint_tree": 1, "learn_committed": 3}
Result = TypeVar("Result")


def _alike(lists: tuple[Any, ...]) -> bool:
    """Whether a device takes them in one launch: alike in type and strides, without gaps."""
    kinds = {value.dtype for values in lists for value in values}
    pairs = list(zip(*lists, strict=True))
    return len(kinds) == 1 and all(a.stride() == b.stride() and a.is_contiguous() for a, b in pairs)


class Launches(TorchDispatchMode):
    """While it is active, `count` and `replays` go up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.replays = 0
        self._hushed = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in results)
        result = func(*args, **(kwargs or {}))
        is_empty = isinstance(result, Tensor) and not result.numel()
        if str(func).startswith("aten._foreach") and not self._hushed:
            self.count += 0 if _alike(args) else len(args[0]) - 1
        self.count += not (self._hushed or is_view or is_empty or str(func).startswith(_FREE))
        return result

    def as_many(self, launches: int, compute: Callable[..., Result]) -> Callable[..., Result]:
        """The same computation, counted as so many."""

        def counted(*args: Any, **kwargs: Any) -> Result:
            with self._hush():
                result = compute(*args, **kwargs)
            self.count += 0 if self._hushed else launches
            return result

        return counted

    def stand_for_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count captures and our ops as what they are there, read as late; to be called before an engine is built."""
        monkeypatch.setattr("kernels.graph_runner.rerun", self.replayed)
        ops = {name: self.as_many(count, getattr(REFERENCE, name)) for name, count in _DEVICE_LAUNCHES.items()}
        table = Ops(**ops)
        monkeypatch.setattr("kernels.ops._table", lambda device_type: table)
        monkeypatch.setattr("drafters.readback.readback_of", lambda device: Readback(late=True))

    def replayed(self, compute: Callable[[], None]) -> Callable[[], None]:
        """A capture, counted as one replay."""
        repeat = self.as_many(0, rerun(compute))

        def counted() -> None:
            repeat()
            self.replays += 1

        return counted

    @contextmanager
    def _hush(self) -> Iterator[None]:
        before, self._hushed = self._hushed, True
        try:
            yield
        finally:
            self._hushed = before
