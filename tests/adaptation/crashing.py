"""Crashes and full disks on demand.

`Fuel` is spent by every byte written and every rename, sync and removal; when it runs out the process is as good as
killed: nothing more happens on disk, not even tidying up.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest


class Killed(BaseException):
    """No handler of ordinary errors sees it, as none would see a kill -9."""


class Fuel:
    def __init__(self, amount: int) -> None:
        self.left = amount

    def spend(self, wanted: int) -> int:
        """How much of this may still happen."""
        granted = min(wanted, self.left)
        self.left -= granted
        return granted

    def write(self, path: Path, data: bytes) -> None:
        granted = self.spend(len(data) + 1)
        if granted:
            with path.open("wb") as file:
                file.write(data[: granted - 1])
        if granted <= len(data):
            self.run_out()

    def run_out(self) -> NoReturn:
        raise Killed

    def guard(self, action: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            if not self.spend(1):
                self.run_out()
            return action(*arguments, **options)

        return guarded


@contextmanager
def running_on(fuel: Fuel) -> Iterator[None]:
    """Kill at the end of the fuel; leave without a trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fuel.guard(os.fsync))
        patch.setattr(shutil, "rmtree", fuel.guard(shutil.rmtree))
        for name in ("rename", "replace", "mkdir", "unlink"):
            patch.setattr(Path, name, fuel.guard(getattr(Path, name)))
        patch.setattr(Path, "write_bytes", lambda path, data: fuel.write(path, data))
        yield


@contextmanager
def disk_full_after(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: the kernel itself refuses, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
