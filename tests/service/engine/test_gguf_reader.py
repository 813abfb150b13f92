"""Reading GGUF files: what the gguf package wrote is read, and what is damaged, doubled or in parts is named."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from service.engine.gguf_reader import open_gguf
from service.errors import StartupError

NUMBERS = np.arange(96, dtype=np.float32).reshape(3, 32)


def write(path: Path, tensors: Sequence[str] = ("one", "two"), *, part: tuple[int, int] | None = None) -> Path:
    writer = GGUFWriter(path, "llama")
    if part is not None:
        writer.add_uint16("split.no", part[0])
        writer.add_uint16("split.count", part[1])
    writer.add_float32("llama.rope.freq_base", 0.5)
    writer.add_bool("llama.attention.causal", True)
    writer.add_key_value("some.big", -(2**40), GGUFValueType.INT64)
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "é日"])
    writer.add_array("some.numbers", [1, 2, 3])
    for name in tensors:
        writer.add_tensor(name, NUMBERS)
    writer.add_tensor(
        f"blocks-{tensors[0]}", quantize(NUMBERS, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def replaced(path: Path, old: bytes, new: bytes) -> Path:
    """The file with the last occurrence of some bytes replaced by as many others."""
    data = path.read_bytes()
    place = data.rindex(old)
    path.write_bytes(data[:place] + new + data[place + len(old) :])
    return path


def test_a_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    found, expected = open_gguf(path), GGUFReader(path)
    theirs = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert found.fields == theirs
    assert found.architecture == "llama"
    for tensor in expected.tensors:
        ours = found.tensors[tensor.name]
        assert (ours.kind, list(ours.shape)) == (tensor.tensor_type, tensor.shape.tolist()[::-1])
        assert np.array_equal(ours.data, tensor.data)
    assert list(found.tensors) == [tensor.name for tensor in expected.tensors]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b"two", b"one", "tensor 'one' occurs twice"),
        (b"GGUF", b"GGML", "not as little-endian GGUF version 2 or 3"),
        (b"GGUF\3", b"GGUF\1", "version 1"),
        (b"\xc3\xa9\xe6", b"\xff\xff\xff", "utf-8"),
    ],
    ids=["doubled tensor", "magic", "version", "text"],
)
def test_what_is_damaged_is_named(old: bytes, new: bytes, complaint: str, tmp_path: Path) -> None:
    path = replaced(write(tmp_path / "a.gguf"), old, new)
    with pytest.raises(StartupError, match=f"damaged or incomplete.*{complaint}"):
        open_gguf(path)


def test_a_doubled_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_uint32("llama.block_clone", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartupError, match=r"key 'llama\.block_count' occurs twice"):
        open_gguf(replaced(path, b"llama.block_clone", b"llama.block_count"))


@pytest.mark.parametrize("left", [0, 3, 30, 100, 200])
def test_a_header_that_ends_early_is_refused(left: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(StartupError, match="damaged or incomplete"):
        open_gguf(path)


def test_a_tensor_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"tensor 'blocks-one' of shape \[3, 32\] and type Q8_0 is truncated"):
        open_gguf(path)


def test_all_parts_of_a_split_model_are_read(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", ["a"], part=(0, 2))
    second = write(tmp_path / "m-00002-of-00002.gguf", ["b"], part=(1, 2))
    assert list(open_gguf(first).tensors) == ["a", "blocks-a", "b", "blocks-b"]
    with pytest.raises(StartupError, match=r"part 2 of a split model: give the first part, m-00001-of-00002\.gguf"):
        open_gguf(second)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(StartupError, match=r"alone\.gguf is one of 2 parts of a model"):
        open_gguf(alone)
    with pytest.raises(StartupError, match=r"one of 2 parts of a model, but m-00001-of-00002\.gguf is missing"):
        open_gguf(first)


def test_a_merged_file_is_whole(tmp_path: Path) -> None:
    assert list(open_gguf(write(tmp_path / "merged.gguf", ["a"], part=(0, 0))).tensors) == ["a", "blocks-a"]


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", ["last"])
    kind = GGMLQuantizationType.Q8_0.to_bytes(4, "little")
    place = path.read_bytes().rindex(b"blocks-last")
    data = bytearray(path.read_bytes())
    at = data.index(kind, place + 28)
    data[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(StartupError, match="'blocks-last' has the type 99"):
        open_gguf(path)


def test_an_alignment_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(StartupError, match=r"general\.alignment is 0"):
        open_gguf(path)


def test_parts_share_no_tensor(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", ["a"], part=(0, 2))
    write(tmp_path / "m-00002-of-00002.gguf", ["b", "a"], part=(1, 2))
    with pytest.raises(StartupError, match="tensor 'a' is also in another part"):
        open_gguf(first)
