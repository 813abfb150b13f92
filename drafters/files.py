"""Writes files and folders atomically, so that a crash leaves either the old or the new one, and locks files."""

import hashlib
import hmac
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished-"
"""Prefix of the temporary names under which files and folders are written."""

_HASH_BYTES = 32
_LONGEST_LINE = 1 << 16  # bytes
_PIECE = 1 << 20  # bytes that are read at a time


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace the file at `path`, or create a folder there. The `with` block writes to the temporary path that is
    yielded, which is then synced to disk and renamed to `path`. If the block raises or the disk fails, `path` stays as
    it was.

    `shared`: several processes may write the same path at once. Raises OSError, also if `path` is a non-empty folder.
    """
    suffix = f".{os.getpid()}" if shared else ""
    unfinished = path.with_name(f"{UNFINISHED}{path.name}{suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(unfinished)
        yield unfinished
        _sync(unfinished)
        unfinished.replace(path)
        _sync_entry(path.parent)
    finally:
        with suppress(OSError):
            _remove(unfinished)


def replace_file(path: Path, data: bytes, *, shared: bool = False) -> None:
    """Write a file atomically, replacing an existing one (see `replacing`). Raises OSError."""
    with replacing(path, shared=shared) as unfinished:
        unfinished.write_bytes(data)


def create_private(path: Path) -> BinaryIO:
    """Create a file that only the user of this process can read, and open it for writing. Raises OSError, also if the
    file exists."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


class KeyedFile:
    """A file that begins with a line of JSON and ends with a keyed hash of everything before it."""

    def __init__(self, path: Path, key: bytes, header: Mapping[str, object], *, kind: str) -> None:
        """`header`: what a file of another server differs in; `kind`: of its content, for messages."""
        self.path = path
        self.header = header
        self._key, self._kind = key, kind

    @property
    def first_line(self) -> bytes:
        """The header as it is written."""
        return json.dumps(self.header).encode() + b"\n"

    def hash(self) -> "hashlib.blake2b":
        """Return the hash of nothing yet."""
        return hashlib.blake2b(key=self._key, digest_size=_HASH_BYTES)

    def check(self, file: BinaryIO) -> int:
        """Verify header and hash of a file, and seek to its content. Returns the byte offset at which the content ends.
        Raises ValueError."""
        end = file.seek(0, os.SEEK_END) - _HASH_BYTES
        file.seek(0)
        first = file.readline(_LONGEST_LINE)
        try:
            header = json.loads(first)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or "format" not in header:
            raise ValueError(f"it is not a file of {self._kind}")
        if others := [name for name, value in self.header.items() if header.get(name) != value]:
            raise ValueError(f"it was written with another {', '.join(others)}")
        mac, left = self.hash(), end - len(first)
        mac.update(first)
        while left > 0 and (data := file.read(min(left, _PIECE))):
            mac.update(data)
            left -= len(data)
        if not hmac.compare_digest(mac.digest(), file.read()):
            raise ValueError("it is damaged, or was written with another key")
        file.seek(len(first))
        return end


def lock(path: Path, *, waits: bool = False) -> int:
    """Lock a file, created if missing, until the returned descriptor is closed or the process ends. Without `waits`,
    raises BlockingIOError if another process holds the lock. Raises OSError. On Windows the file is opened without a
    lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        import fcntl
    except ImportError:
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Sync a file, or a folder with all files in it, to disk."""
    for inner in path.iterdir() if path.is_dir() else ():
        _sync(inner)
    _sync_entry(path)


def _sync_entry(path: Path) -> None:
    """Sync a file, or the entries of a folder (POSIX only), to disk."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
