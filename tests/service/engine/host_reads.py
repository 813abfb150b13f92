"""Notes each place where the host asks a device for values, which it then has to wait for."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {
    Tensor.tolist: "tolist",
    Tensor.item: "item",
    Tensor.__int__: "int",
    Tensor.__float__: "float",
    Tensor.__bool__: "bool",
    Tensor.__index__: "index",
    Tensor.nonzero: "nonzero",
    torch.nonzero: "nonzero",
    Tensor.cpu: "cpu",
    Tensor.numpy: "numpy",
    Tensor.unique: "unique",
    torch.unique: "unique",
    torch.bincount: "bincount",
}
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class HostReads(TorchFunctionMode):
    """While it is active, `seen` collects "module:function kind" of every read, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _READS.get(func) or ("mask" if func in _INDEXING and _has_mask(args[1]) else None)
        if kind is not None:
            self.seen.append(f"{_caller()} {kind}")
        return func(*args, **(kwargs or {}))


def _has_mask(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


def _caller() -> str:
    """The function of ours that asked, innermost."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.split(".")[0] in ("service", "drafters", "kernels"):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
