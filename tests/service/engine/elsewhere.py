"""A device that is not there: tensors that claim to lie on it, compute on the CPU, and refuse to be mixed with others.

What a real device would refuse shows without one: a tensor made in the wrong place, a list read back by accident. Only
Python sees the claim, so kernels and streams are beyond it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("cuda")
_MOVES = (Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.tolist, Tensor.__setitem__, Tensor.index_copy_)
_CLAIMS: dict[Any, object] = {Tensor.device.__get__: ELSEWHERE, Tensor.is_cuda.__get__: False}  # type: ignore[attr-defined]


class Claimed(torch.Tensor):
    """A tensor that says it is elsewhere."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Places(TorchFunctionMode):
    """Sees what is made there, and what is made here."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def claims() -> Iterator[None]:
    """While it lasts, tensors can be made elsewhere and stay there."""
    with _Places():
        yield


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    claimed = [leaf for leaf in leaves if isinstance(leaf, (Claimed, torch.nn.Parameter))]
    if any(isinstance(leaf, Claimed) for leaf in claimed) and func in _CLAIMS:
        return _CLAIMS[func]
    _refuse_mixture(func, leaves, claimed)
    asked = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, (torch.device, str)) and _is_there(leaf)]
    args, kwargs = tree_map(_here, (args, {name: value for name, value in kwargs.items() if name != "pin_memory"}))
    with torch._C.DisableTorchFunction():
        result = func(*args, **kwargs)
    stays = bool(claimed) and func is not Tensor.cpu and not (func is Tensor.to and _goes_home(args, kwargs, asked))
    return tree_map(_there, result) if stays or asked else result


def _refuse_mixture(func: Callable[..., Any], leaves: Sequence[Tensor], claimed: Sequence[Tensor]) -> None:
    """Raise RuntimeError as a device would; numbers may come from anywhere, and weights are there."""
    strangers = [x for x in leaves if not isinstance(x, (Claimed, torch.nn.Parameter)) and x.ndim and x.numel()]
    if claimed and strangers and func not in _MOVES:
        name = getattr(func, "__name__", func)
        raise RuntimeError(f"{name} of tensors here and elsewhere: {[tuple(x.shape) for x in strangers]}")


def _goes_home(args: tuple[Any, ...], kwargs: dict[str, Any], asked: Sequence[object]) -> bool:
    named = [leaf for leaf in tree_leaves((args[1:], kwargs)) if isinstance(leaf, (torch.device, str))]
    return bool(named) and not asked


def _is_there(place: torch.device | str) -> bool:
    return str(place).startswith(ELSEWHERE.type)


def _here(leaf: Any) -> Any:
    if isinstance(leaf, Claimed):
        return leaf.as_subclass(Tensor)
    return torch.device("cpu") if isinstance(leaf, torch.device) and _is_there(leaf) else leaf


def _there(leaf: Any) -> Any:
    is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, torch.nn.Parameter)
    return leaf.as_subclass(Claimed) if is_plain else leaf
