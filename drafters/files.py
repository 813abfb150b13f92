"""Writes files and folders so that a crash leaves the old one or the new one, and locks files for one process."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished-"
"""Prefix of the names under which files and folders are written."""


@contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace a file, or make a new folder. The block writes it at the yielded path; then it is synced to disk and
    renamed to `path`. If the block raises or the disk fails, nothing changes at `path`.

    `shared`: several processes may do so at once. Raises OSError, also for a folder that is not empty.
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
    """Write a file in place of any that is there, as `replacing` does. Raises OSError."""
    with replacing(path, shared=shared) as unfinished:
        unfinished.write_bytes(data)


def create_private(path: Path) -> BinaryIO:
    """Create a file that only this process's user can read. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def lock(path: Path, *, waits: bool = False) -> int:
    """Lock a file, which is created if it is missing, until the descriptor is closed or the process ends. Windows has
    no such locks: the file is only opened. Raises BlockingIOError if another process holds the lock, unless `waits`;
    OSError. # -> the descriptor"""
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
    """Sync a file, or a folder with all that it contains."""
    for inner in path.iterdir() if path.is_dir() else ():
        _sync(inner)
    _sync_entry(path)


def _sync_entry(path: Path) -> None:
    """Sync a file, or the names in a folder, which only POSIX can."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
