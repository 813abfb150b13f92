"""What Triton's interpreter lacks: device functions, products in the device's order, rounding to bf16, and speed.

Logarithms are torch's, so that they have the bits of the reference on the CPU. Products in full precision run key by
key, as the multiply-adds of a device do. The interpreter cuts float32 off where a device rounds to the nearest bf16.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra import libdevice
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_Cast = Callable[[InterpreterBuilder, TensorHandle, tl.dtype], TensorHandle]


def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the interpreter what it lacks."""
    monkeypatch.setattr(libdevice, "log", _elementwise(torch.log))
    monkeypatch.setattr(libdevice, "log1p", _elementwise(torch.log1p))
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(InterpretedFunction, "__call__", _called)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", _rounding(InterpreterBuilder.cast_impl))


def _called(function: InterpretedFunction, *args: Any, **options: Any) -> Any:
    """A function that a kernel calls. Preparing the language for it takes longer than most functions, and once does."""
    _prepare(function)
    return function.rewrite()(*args, **options)


@cache
def _prepare(function: InterpretedFunction) -> None:
    interpreter._patch_lang(function.fn)


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[[tl.tensor], tl.tensor]:
    def apply(x: tl.tensor) -> tl.tensor:
        values = function(torch.from_numpy(np.ascontiguousarray(x.handle.data))).numpy()
        return tl.tensor(TensorHandle(values, x.handle.dtype), x.type)

    return apply


def _dot(
    builder: InterpreterBuilder,
    left: TensorHandle,
    right: TensorHandle,
    start: TensorHandle,
    input_precision: object,
    max_num_imprecise_acc: int,
) -> TensorHandle:
    """# left [members, inner], right [inner, columns], start [members, columns]"""
    total = start.data.copy()
    rows, columns = _float32(left), _float32(right)
    for key in range(rows.shape[1]):
        total += rows[:, key, None] * columns[key]
    return TensorHandle(total, start.dtype.scalar)


def _rounding(cast: _Cast) -> _Cast:
    """The same for all types but float32 to bf16."""

    def rounded(builder: InterpreterBuilder, handle: TensorHandle, to: tl.dtype) -> TensorHandle:
        if handle.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(builder, handle, to)
        nearest = torch.from_numpy(np.array(handle.data, dtype=np.float32)).to(torch.bfloat16)
        return TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)

    return rounded


def _float32(handle: TensorHandle) -> NDArray[np.float32]:
    """bf16 is kept as its 16 bits."""
    is_bfloat16 = handle.dtype.scalar == tl.bfloat16
    values: NDArray[np.float32] = (
        (handle.data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else handle.data.astype(np.float32)
    )
    return values
