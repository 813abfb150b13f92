import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from adaptation.durable import seal, sync_folder, unseal, write_synced
from adaptation.errors import Damaged

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), _values, max_size=5))
def test_what_was_sealed_comes_back(content: dict[str, JsonValue]) -> None:
    assert unseal(seal(content)) == content


def test_every_flipped_bit_is_seen() -> None:
    data = seal({"version": 12, "scores": {"serving": 2.5, "anchor": -1e-7}, "date": "2026-01-01", "parent": None})
    for place in range(len(data)):
        for bit in range(8):
            altered = bytearray(data)
            altered[place] ^= 1 << bit
            with pytest.raises(Damaged):
                unseal(bytes(altered))


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_cut_or_longer_text_is_seen(cut: int) -> None:
    data = seal({"version": 12})
    for altered in (data[:-cut], data[cut:], data + b" " * cut, b"\n" + data):
        with pytest.raises(Damaged):
            unseal(altered)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"{}", b'{"content": 3, "sha256": ""}', b"\xff\xfe", b"[" * 100_000, b"\0" * 100]
)
def test_what_was_never_sealed_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        unseal(data)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_without_a_word_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        seal({"number": number})


def test_a_file_is_written_as_it_is(tmp_path: Path) -> None:
    write_synced(tmp_path / "file", b"old and long")
    write_synced(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_synced(Path("/dev/full"), b"x" * 100)


def test_a_synced_folder_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = os.open(tmp_path, os.O_RDONLY)
    os.close(before)
    sync_folder(tmp_path)
    after = os.open(tmp_path, os.O_RDONLY)
    os.close(after)
    assert after == before
