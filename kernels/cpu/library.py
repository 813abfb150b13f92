"""Finds the compiled kernels that this processor can run, and calls them through their C interface."""

import ctypes
import os
from array import array
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VARIANTS = {
    "avx512bf16": ("avx512_bf16", "avx512_vnni", "avx512_dq"),
    "avx512": ("avx512_vnni", "avx512_dq"),
    "avxvnni": ("avx_vnni", "avx2", "fma3"),
    "avx2": ("avx2", "fma3"),
    "neondot": ("dot", "neon"),
    "neon": ("neon",),
}
"""Builds of the same source, best first, and what a processor must be able to do for each."""

KERNELS = "CPU_KERNELS"
"""The environment variable that names a build, for comparisons."""

_MAKERS = {"avx512bf16": "AMD"}
"""Whose processors alone a build is best on: Intel's multiply pairs of bf16 at half the rate (decision 118)."""

MOST_DIM = 256
"""Dimensions of a head, as in vector.h."""

_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
"""Types that there are kernels for, as they stand in the names of functions."""

_KINDS = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


class Rows(ctypes.Structure):
    """`Rows` of ops.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("order", "seen", "path_start", "path_slots")]


class Layer(ctypes.Structure):
    """`Layer` of ops.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_heads", "kv_heads", "dim", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


@cache
def variant() -> str | None:
    """The build that runs here: the one that `KERNELS` names, else the best; None where none was built, or none fits.
    Raises ImportError when it is stale, or cannot be the one that is named."""
    able, named = torch.cpu.get_capabilities(), os.environ.get(KERNELS)
    for name, needs in VARIANTS.items():
        built = _path(name)
        is_best = name == named or (named is None and _MAKERS.get(name, "") in str(able.get("cpu_name")))
        if built is not None and is_best and all(able.get(need, False) for need in needs):
            _check_fresh(built)
            return name
    if named is not None:
        raise ImportError(f"{KERNELS}={named}: there is no such build, or this processor cannot run it")
    return None


@cache
def function(name: str, kinds: str, dtype: torch.dtype | None = None) -> Any:
    """The C function of that name for tensors of that type, and what it takes: p address, n int64, i int, f float."""
    found = variant()
    assert found is not None, "no kernels are compiled for this processor"
    called = getattr(_load(found), name if dtype is None else f"{name}_{_NAMES[dtype]}")
    called.argtypes = [_KINDS[kind] for kind in kinds]
    return called


def address(tensor: Tensor | None) -> int | None:
    """Of its first element, which the others must follow without gaps."""
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Iterable[Tensor]) -> "array[int]":
    """The same of several, as a structure in C has them, for as long as this is kept."""
    return array("Q", [tensor.data_ptr() for tensor in tensors])


def halves(pool: Tensor) -> tuple[int, int]:
    """Addresses of a layer's keys and values. # pool [2, slots, kv_heads, head_dim] float32"""
    keys = pool.data_ptr()
    return keys, keys + pool.stride(0) * pool.itemsize


@cache
def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_path(name)))


def _path(name: str) -> Path | None:
    """Where the build of that name lies, if it was built."""
    spec = find_spec(f"{__package__}.{name}")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _check_fresh(built: Path) -> None:
    """In a checkout the sources lie beside what was built from them, and may have changed since. Raises ImportError."""
    sources = (*built.parent.glob("*.cpp"), *built.parent.glob("*.h"))
    newer = [path.name for path in sources if path.stat().st_mtime > built.stat().st_mtime]
    if newer:
        raise ImportError(f"{built.name} is older than {', '.join(sorted(newer))}: compile it anew by `make install`")
