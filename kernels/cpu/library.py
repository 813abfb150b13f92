"""Selects the build of the compiled kernels for this processor, calls its C functions, and sets their thread count.

Only the C++ source declares the functions' signatures: `EXPORT` (export.h) stores each signature with the function's
address."""

import ctypes
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

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
"""Builds of the same source, best first, with the processor features that each needs."""

KERNELS = "CPU_KERNELS"
"""Environment variable that selects a build, for comparisons."""

_MAKERS = {"avx512bf16": "AMD"}
"""Vendor to which a build is restricted: other vendors' processors multiply bf16 pairs at half the rate (decision
118)."""

MOST_DIM = 512
"""Largest head dimension, as in vector.h."""

_NAMES = {torch.bfloat16: "bf16", torch.float32: "float"}
"""Suffix of an export's name for each supported activation type."""

_C_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}


Made = TypeVar("Made")


class _Export(ctypes.Structure):
    """The C structure `Export` of export.h: a function's address and signature."""

    _fields_ = (("address", ctypes.c_void_p), ("takes", ctypes.c_char_p))


class CStruct(bytes):
    """A C structure of addresses, int64 numbers, and then floats. Keeps its tensors alive; they must be contiguous."""

    words: tuple[Tensor | int | None, ...]

    def __new__(cls, *words: Tensor | int | None, floats: tuple[float, ...] = ()) -> "CStruct":
        layout = _layout(len(words), len(floats))
        self = super().__new__(
            cls, layout.pack(*[w.data_ptr() if isinstance(w, Tensor) else w or 0 for w in words], *floats)
        )
        self.words = words
        return self


def remembered(build: Callable[[Any], CStruct], most: int = 4) -> Callable[[Any], CStruct]:
    """Cache the C structures of objects whose tensors never move, for the last objects, `most` at a time."""
    kept: dict[int, tuple[object, CStruct]] = {}

    def structure_of(value: object) -> CStruct:
        found = kept.get(id(value))  # ids are unique, because kept objects stay alive
        if found is None:
            if len(kept) == most:
                kept.clear()
            found = kept[id(value)] = value, build(value)
        return found[1]

    return structure_of


def kept(build: Callable[..., Made]) -> Callable[..., Made]:
    """Keep the buffers that `build` makes of sizes, for the last sizes and each thread: a step allocates nothing, and a
    call overwrites the results of the last one of the same sizes."""
    found = lru_cache(maxsize=_MOST_KEPT)(lambda thread, *sizes: build(*sizes))

    def kept_of(*sizes: int) -> Made:
        return found(threading.get_ident(), *sizes)

    return kept_of


_MOST_KEPT = 256
_PASSED_AS_THEY_ARE = frozenset((int, bool, float, bytes, CStruct, type(None)))


@cache
def _layout(words: int, floats: int) -> struct.Struct:
    return struct.Struct(f"{words}q{floats}f0q")  # padded to whole words


@cache
def variant() -> str | None:
    """Name of the build to run: the one that the variable `KERNELS` names, or else the best one for this processor.
    Returns None if there is none. Raises ImportError if that build is older than its sources, or if the named build is
    missing or cannot run here."""
    capabilities, named = torch.cpu.get_capabilities(), os.environ.get(KERNELS)
    for name, needs in VARIANTS.items():
        built = _path(name)
        is_best = name == named or (named is None and _MAKERS.get(name, "") in str(capabilities.get("cpu_name")))
        if built.is_file() and is_best and all(capabilities.get(need, False) for need in needs):
            _check_fresh(built)
            return name
    if named is not None:
        raise ImportError(f"{KERNELS}={named}: there is no such build, or this processor cannot run it")
    return None


def call(name: str, *arguments: Tensor | int | float | bytes | None, dtype: torch.dtype | None = None) -> int:
    """Call an exported C function, in its instance for `dtype` if it has several. Tensors and structures are passed as
    addresses; tensors must be contiguous."""
    values = [value if type(value) in _PASSED_AS_THEY_ARE else value.data_ptr() for value in arguments]  # type: ignore[union-attr]  # only tensors are left
    result: int = function(name, dtype)(*values)
    return result


def use_threads(number: int) -> None:
    """Let the calling thread compute with `number` threads, itself included; every other thread computes alone.

    Compiled kernels have their own thread pool (team.h), and torch then uses one thread: two pools would wait for each
    other's processors (decision 0141). Without compiled kernels, torch uses the threads."""
    if variant() is not None:
        call("use_threads", number)
        torch.set_num_threads(1)
        return
    torch.set_num_threads(number)
    # A thread that has not computed yet gets the number that any thread has set last: make that 1.
    others = threading.Thread(target=torch.set_num_threads, args=(1,))
    others.start()
    others.join()


def threads_in_use() -> int:
    """Number of threads that compute for the calling thread, itself included."""
    return torch.get_num_threads() if variant() is None else call("threads_in_use")


def return_large_buffers() -> None:
    """Let the C library return freed buffers of 16 MiB and more to the system at once. glibc raises this bound to 32
    MiB by itself, and then keeps the buffers of large steps between small blocks: under changing loads a server grew
    by gigabytes. With a bound of 4 MiB steps of 64 sequences took 6 % longer, as the system clears each new page."""
    with suppress(AttributeError):  # another C library has no such bound
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


_MMAP_THRESHOLD, _LARGE = -3, 1 << 24  # the parameter's number in malloc.h, bytes


def weight_memory(num_bytes: int) -> Tensor:
    """Allocate zeros for a weight. Weights lie side by side in huge pages, if the system has them: a forward reads all
    of them, and with small pages it waits for the addresses, too. # -> [num_bytes] uint8"""
    with _arena_lock:
        size = -(-num_bytes // _LINE) * _LINE
        if _arena[0].shape[0] < size:
            _arena[0] = _huge_pages(max(size, _ARENA))
        taken, _arena[0] = _arena[0][:num_bytes], _arena[0][size:]
    return taken


def pool_memory(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros for keys and values: on a CPU in huge pages, if the system has them. A forward reads scattered
    slots, and with small pages it waits for the address of each, too. # -> [*size]"""
    if device.type == "cpu":
        return _huge_pages(torch.Size(size).numel() * dtype.itemsize).view(dtype).view(size)
    return torch.zeros(size, dtype=dtype, device=device)


def _huge_pages(num_bytes: int) -> Tensor:
    """Map zeros that begin at a huge page, where there are any. # -> [num_bytes] uint8"""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # another system than Linux
        return torch.zeros(num_bytes, dtype=torch.uint8)
    area = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(area, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:num_bytes]


_LINE, _HUGE_PAGE, _ARENA = 64, 1 << 21, 1 << 25
_arena, _arena_lock = [torch.empty(0, dtype=torch.uint8)], threading.Lock()


def contiguous(*tensors: Tensor) -> list[Tensor]:
    """Make each tensor contiguous. # [...] each"""
    return [tensor.contiguous() for tensor in tensors]


@cache
def function(name: str, dtype: torch.dtype | None = None) -> Any:
    """Look up an exported C function, in its instance for `dtype` if it has several."""
    found = variant()
    assert found is not None, "no kernels are compiled for this processor"
    export = _Export.in_dll(_load(found), f"export_{name}" if dtype is None else f"export_{name}_{_NAMES[dtype]}")
    takes = [_C_TYPES[letter] for letter in export.takes.decode()]
    return ctypes.CFUNCTYPE(ctypes.c_int64, *takes)(export.address)


def halves(pool: Tensor) -> tuple[int, int]:
    """Return the addresses of a layer's keys and of its values. # pool [2, slots, kv_heads, head_dim]"""
    keys = pool.data_ptr()
    return keys, keys + pool.stride(0) * pool.itemsize


@cache
def _load(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_path(name)))


def _path(name: str) -> Path:
    """Path of a build's file, as setup.py names it."""
    return Path(__file__).with_name(f"{name}.so")


def _check_fresh(built: Path) -> None:
    """Raise ImportError if a source in the same folder (as in a checkout) is newer than the build."""
    sources = (*built.parent.glob("*.cpp"), *built.parent.glob("*.h"))
    newer = [path.name for path in sources if path.stat().st_mtime > built.stat().st_mtime]
    if newer:
        raise ImportError(f"{built.name} is older than {', '.join(sorted(newer))}: rebuild it by `make install`")
