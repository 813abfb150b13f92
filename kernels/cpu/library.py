"""Finds the compiled kernels that this processor can run, and calls them through their C interface."""

import ctypes
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

VARIANTS = {"avx512bf16": ("avx512_bf16", "avx512_dq", "avx512_vl"), "avx2": ("avx2", "fma3"), "neon": ("neon",)}
"""Builds of the same source, best first, and what a processor must be able to do for each."""

NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
"""Types that there are kernels for, as they stand in the names of functions."""


class Rows(ctypes.Structure):
    """`Rows` of tree_attention.cpp."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("order", "seen", "path_start", "path_slots")]


class Layer(ctypes.Structure):
    """`Layer` of tree_attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_heads", "kv_heads", "dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@cache
def variant() -> str | None:
    """The build that runs here; None where none was built, or none fits."""
    able = torch.cpu.get_capabilities()
    for name, needs in VARIANTS.items():
        if find_spec(f"{__package__}.{name}") is not None and all(able.get(need, False) for need in needs):
            return name
    return None


@cache
def function(name: str, dtype: torch.dtype | None = None) -> Any:
    """The C function of that name for tensors of that type; tensors are handed over as addresses."""
    found = variant()
    assert found is not None, "no kernels are compiled for this processor"
    return getattr(_load(found), name if dtype is None else f"{name}_{NAMES[dtype]}")


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Of its first element, which the others must follow without gaps."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def _load(name: str) -> ctypes.CDLL:
    spec = find_spec(f"{__package__}.{name}")
    assert spec is not None and spec.origin is not None
    return ctypes.CDLL(spec.origin)
