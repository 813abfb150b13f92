"""Notes each place where the host waits for a device: it asks for values, or uploads what is in its own memory.

`torch.tensor(list, device="cuda")` and an index by a list copy from memory that is not pinned, and end in a
synchronisation of the stream.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = {
    "bool": ("__bool__", "is_nonzero"),
    "nonzero": ("nonzero", "argwhere"),
    "unique": ("unique", "unique_consecutive"),
    "equal": ("equal", "allclose"),
    "mask": ("masked_select",),
    **{name.strip("_"): (name,) for name in ("tolist", "item", "cpu", "numpy", "bincount")},
    **{name.strip("_"): (name,) for name in ("__int__", "__float__", "__index__")},
}
_READS = {
    getattr(owner, name): kind
    for kind, names in _NAMES.items()
    for name in names
    for owner in (Tensor, torch)
    if hasattr(owner, name)
}
_UPLOADS = (torch.tensor, torch.as_tensor)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


class HostReads(TorchFunctionMode):
    """While it is active, `seen` collects "module:function kind" of every read, and `uploads` every "module:function"
    that copies from the host, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.uploads: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = _READS.get(func) or ("mask" if func in _INDEXING and _has_mask(args[1]) else None)
        if kind is not None:
            self.seen.append(f"{_caller()} {kind}")
        if func in _UPLOADS or (func in _INDEXING and _has_list(args[1])):
            self.uploads.append(_caller())
        return func(*args, **(kwargs or {}))


def _has_mask(index: object) -> bool:
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in _parts(index))


def _has_list(index: object) -> bool:
    return any(isinstance(part, list) for part in _parts(index))


def _parts(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else (index,)


def _caller() -> str:
    """The function of ours that asked, innermost."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.split(".")[0] in ("service", "drafters", "kernels"):
            return f"{name}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
