"""Reads GGUF files of versions 2 and 3: metadata as Python values, tensors as views of the memory-mapped file.

The format is described in ggml's docs/gguf.md. The `gguf` package's own reader is not used: it creates an array per
string, which takes seconds for a large vocabulary, and it neither reads split files nor names truncated tensors.
"""

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from service.errors import StartupError

_KINDS = {kind.value for kind in GGMLQuantizationType}
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # default alignment of tensors, in bytes
_SCALARS: Mapping[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_NUMBERS: Mapping[GGMLQuantizationType, Any] = {
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.F64: np.float64,
}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_LENGTH = struct.Struct("<Q")
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, struct.error)


class GGUFTensor(NamedTuple):
    """A tensor of a file, as a view of the mapped bytes."""

    shape: tuple[int, ...]  # [out, in], the order of torch
    kind: GGMLQuantizationType
    data: NDArray[Any]  # [*shape] for F32, F16 and F64; else bytes, uint8 [*shape[:-1], row_bytes]
    columns: NDArray[np.int64] | None = None  # [in], places of the columns in `data`; None: as they are


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """An opened model: metadata of the first part, and the tensors of all parts by name, in file order."""

    path: Path  # path of the first part
    fields: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]
    _maps: tuple[mmap.mmap, ...]

    @property
    def architecture(self) -> str:
        """Value of `general.architecture`."""
        return str(self.fields.get("general.architecture", ""))

    def give_back(self) -> None:
        """Let the operating system drop the pages read so far, as each tensor is read only once."""
        for one in self._maps:
            one.madvise(mmap.MADV_DONTNEED)


def part_paths(path: Path) -> list[Path]:
    """List the paths of all parts of a model, given the path of the first. Raises StartupError for another part."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) == 0:
        return [path]
    parts = [path.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in range(1, int(named[3]) + 1)]
    if int(named[2]) != 1:
        raise StartupError(f"{path} is part {int(named[2])} of a split model: give the first part, {parts[0].name}")
    return parts


def open_gguf(path: Path) -> GGUFFile:
    """Open a model with all its parts. Raises StartupError for missing parts or damaged files."""
    paths = part_paths(path)
    missing = [one.name for one in paths if not one.is_file()]
    if missing:
        raise StartupError(
            f"{path} is one of {len(paths)} parts of a model, but {', '.join(missing)} is missing in its folder"
        )
    parts = [_open_part(one) for one in paths]
    tensors: dict[str, GGUFTensor] = {}
    for one in parts:
        count = one.fields.get("split.count") or 1  # a merged file keeps the key, with value 0
        if count != len(paths):
            raise StartupError(
                f"{one.path} is one of {count} parts of a model: keep the names of all parts, as in "
                f"NAME-00001-of-{count:05}.gguf, and give the first"
            )
        twice = next((name for name in one.tensors if name in tensors), None)
        if twice is not None:
            raise StartupError(f"{one.path}: tensor {twice!r} is also in another part; download the model again")
        tensors |= one.tensors
    return GGUFFile(path, parts[0].fields, tensors, tuple(one._maps[0] for one in parts))


def _open_part(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(mapped)
        fields, tensors = cursor.header()
    except _DAMAGE as error:
        raise StartupError(
            f"{path}: this GGUF file is damaged or incomplete; copy or download it again ({error})"
        ) from error
    return GGUFFile(path, fields, tensors, (mapped,))


class _Cursor:
    """Reads consecutive values from a mapped file."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._at = mapped, 0

    def header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Read the metadata and tensors of the file. Raises one of the exceptions in `_DAMAGE` if it is damaged, and
        StartupError for unknown tensor types."""
        magic, version = self._mapped[:4], 0
        if magic == _MAGIC:
            self._at = 4
            version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"it begins with {magic!r}, version {version}, not as little-endian GGUF version 2 or 3")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        fields = _distinct("key", self._fields(num_fields))
        infos = _distinct("tensor", self._infos(num_tensors))
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return fields, {name: self._tensor(name, start, *info) for name, info in infos.items()}

    def _fields(self, count: int) -> Iterator[tuple[str, Any]]:
        for _ in range(count):
            name, kind = self._string(), self._number("<I")
            yield name, self._value(GGUFValueType(kind))

    def _infos(self, count: int) -> Iterator[tuple[str, tuple[tuple[int, ...], GGMLQuantizationType, int]]]:
        for _ in range(count):
            name, dims = self._string(), self._number("<I")
            shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
            kind = self._number("<I")
            if kind not in _KINDS:
                raise StartupError(
                    f"tensor {name!r} has the type {kind}, which adaptree does not support; use another file"
                )
            yield name, (shape, GGMLQuantizationType(kind), self._number("<Q"))

    def _tensor(
        self, name: str, start: int, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
    ) -> GGUFTensor:
        block, size = GGML_QUANT_SIZES[kind]
        number = _NUMBERS.get(kind)
        row = shape[-1] // block * size
        stored = shape if number is not None else (*shape[:-1], row)
        if shape[-1] % block or start + offset + prod(shape[:-1]) * row > len(self._mapped):
            raise ValueError(f"tensor {name!r} of shape {list(shape)} and type {kind.name} is truncated")
        dtype = np.dtype(np.uint8 if number is None else number)
        data = np.frombuffer(self._mapped, dtype, count=prod(stored), offset=start + offset)
        return GGUFTensor(shape, kind, data.reshape(stored))

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._number(_SCALARS[kind])
        item, count = GGUFValueType(self._number("<I")), self._number("<Q")
        if item == GGUFValueType.STRING:
            return self._strings(count)
        form = f"<{count}{_SCALARS[item][1]}"
        values = list(struct.unpack_from(form, self._mapped, self._at))
        self._at += struct.calcsize(form)
        return values

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._mapped, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read `count` strings in one loop, because vocabularies have hundreds of thousands."""
        mapped, at, found = self._mapped, self._at, list[str]()
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(mapped, at)
            end = at + 8 + length
            found.append(mapped[at + 8 : end].decode())
            at = end
        if at > len(mapped):
            raise ValueError("the header is truncated")
        self._at = at
        return found


def _distinct(what: str, pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{what} {name!r} occurs twice")
        found[name] = value
    return found
