"""Bytes on disk that are either the old ones or the new ones, and JSON of which no bit can change unseen.

A sealed text is canonical JSON that carries its own SHA-256: reading it again must give the same bytes, so that
every bit of the file is covered, spaces and the hash included. Knows nothing of what is stored.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from adaptation.errors import Damaged


def seal(content: Mapping[str, JsonValue]) -> bytes:
    """Raises ValueError for numbers that JSON has no word for."""
    return _canonical({"content": dict(content), "sha256": digest(_canonical(dict(content)))})


def unseal(data: bytes) -> dict[str, JsonValue]:
    """Raises Damaged unless these are exactly the bytes that `seal` made."""
    try:
        outer = json.loads(data)
        again = seal(outer["content"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"not a sealed text: {type(error).__name__}") from error
    if again != data:
        raise Damaged("not the bytes that were sealed")
    content: dict[str, JsonValue] = outer["content"]
    return content


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder. Only POSIX can say so."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(value: JsonValue) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False).encode()
