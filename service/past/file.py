"""Persistence of past answers in a file, so that they survive restarts. Layout of the file:

    header (a line of JSON) | per scope: a line of JSON, weights, squares, entries | keyed hash of everything before it

The key of this hash is in the file FILE.key. One process at a time owns a file; any other waits until it is released.
"""

import hmac
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import Tensor

from adaptation.worker import lower_priority
from drafters.files import KeyedFile, create_private, lock, replacing
from drafters.memory.drafter import MemoryDrafter
from drafters.memory.past import ScopeAnswers
from kernels.memory import FEATURES, WAYS, WEIGHT_SETS
from service.engine.thread import EngineThread
from service.errors import StartupError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_FORMAT = 1
_KEY_BYTES = 32
_PIECE = 1 << 17  # 8-byte words copied at a time: one MiB, which the engine's thread copies within a tenth of a step
_LONGEST_LINE = 1 << 16  # bytes
_BYTES_PER_SECOND = 1 << 20
"""Average rate of writing: the default memory once per minute. 86 GiB per day are a third of what a disk of 1 TB is
specified for, and a hundredth of the time of a disk with 100 MiB/s."""
_LEAST_PAUSE_SECONDS = 1.0
_NICENESS = 10
_WEIGHTS_SHAPE = (WEIGHT_SETS, FEATURES)


def key_path(file: Path) -> Path:
    """Path of the key file that belongs to a file of past answers. A lock on the key file covers both files."""
    return file.with_name(f"{file.name}.key")


def key_beside(file: Path) -> bytes:
    """Read the key of a file of past answers; the key is created if it is missing. Raises StartupError."""
    path = key_path(file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size == 0:
            _create_key(path)
        key = path.read_bytes()
    except OSError as error:
        raise StartupError(f"the key {path} cannot be read or created: {error}") from error
    if len(key) != _KEY_BYTES:
        raise StartupError(
            f"{path} does not hold a key of {_KEY_BYTES} bytes; remove it and the file that belongs to it"
        )
    return key


def _create_key(path: Path) -> None:
    """Write a new key, unless another process has written one. Raises OSError."""
    with os.fdopen(lock(path, waits=True), "r+b") as file:
        if not file.read():
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())


class AnswersFile(KeyedFile):
    """Writes, verifies and reads a file of past answers; knows its format, but not when it is written."""

    def __init__(self, path: Path, drafter: MemoryDrafter, *, tokenizer: str, names: bytes) -> None:
        """`tokenizer`: hash of the vocabulary; `names`: key of the hash that replaces scopes. Raises StartupError."""
        self._drafter, key = drafter, key_beside(path)
        named = hmac.digest(key, names, "sha256").hex()
        sizes = [drafter.past.share_buckets, WAYS, *_WEIGHTS_SHAPE]
        header = {"format": _FORMAT, "tokenizer": tokenizer, "sizes": sizes, "names": named}
        super().__init__(path, key, header, kind="past answers")

    def write(self, past: Iterable[ScopeAnswers], stopping: threading.Event | None = None) -> int:
        """Replace the file atomically; returns its size in bytes. A scope that is evicted or forgotten meanwhile is
        left out. Raises OSError, and CancelledError when `stopping` is set."""
        with replacing(self.path) as unfinished, create_private(unfinished) as file:
            file.write(self._put(file, past, stopping))
            return file.tell()

    def _put(self, file: BinaryIO, past: Iterable[ScopeAnswers], stopping: threading.Event | None) -> bytes:
        """Write everything but the keyed hash; returns the hash."""
        mac = self.hash()

        def put(data: bytes) -> None:
            file.write(data)
            mac.update(data)

        put(self.first_line)
        for one in past:
            start, before = file.tell(), mac.copy()
            put(_line({"scope": one.scope}))
            for piece in _pieces((one.weights, one.squares, one.entries)):
                if stopping is not None and stopping.is_set():
                    raise CancelledError
                put(piece.cpu().numpy().tobytes())
            if not self._drafter.past.is_current(one):
                file.seek(start)
                file.truncate()
                mac = before
        return mac.digest()

    def read_scope(self, file: BinaryIO) -> tuple[str, Tensor, Tensor, Iterator[tuple[int, Tensor]]]:
        """Read the next scope: its name, weights and squares [WEIGHT_SETS, FEATURES], and an iterator over its entries.
        The iterator yields the index of the first bucket and the buckets [buckets, WAYS]; exhaust it before the next
        call."""
        scope: str = json.loads(file.readline(_LONGEST_LINE))["scope"]
        weights, squares = (_tensor(file, torch.float32, WEIGHT_SETS * FEATURES).view(_WEIGHTS_SHAPE) for _ in range(2))
        return scope, weights, squares, self._entries(file)

    def _entries(self, file: BinaryIO) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self._drafter.past.share_buckets, _PIECE // WAYS):
            count = min(_PIECE // WAYS, self._drafter.past.share_buckets - start)
            yield start, _tensor(file, torch.int64, count * WAYS).view(count, WAYS)


class MemoryFile:
    """Saves a drafter's past answers to a file regularly, and restores them at start; a listener of the drafter.

    The saving thread copies entries while steps write them. Each 8-byte word is valid by itself (kernels/memory.py), so
    a copy may mix words from before and after a step. A share that is reused during the copy, perhaps for another
    scope, is left out.
    """

    def __init__(self, file: AnswersFile, drafter: MemoryDrafter, engine: EngineThread) -> None:
        self._file, self._drafter, self._engine = file, drafter, engine
        self._pause = _LEAST_PAUSE_SECONDS
        self._has_new, self._stopping = False, threading.Event()
        self._at_once = threading.Event()  # set when answers are forgotten, or when the server stops
        self._forgotten: list[str | None] = []  # scopes forgotten since the last write; None stands for all scopes
        self._is_ours = self._is_read = self._write_failed = False
        self._thread = threading.Thread(target=self._run, name="memory file", daemon=True)
        drafter.past.listeners.append(self)

    @property
    def path(self) -> Path:
        """Path of the file of past answers."""
        return self._file.path

    def start(self) -> None:
        """Start the thread, which restores past answers from the file, and then writes them regularly."""
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread and write the file a last time. Call it after the engine's last step."""
        self._stopping.set()
        self._at_once.set()
        self._thread.join()
        if self._is_read:
            past = self._drafter.past.by_scope
            self._engine.guard.run("memory_file", lambda: self._write(past()), lambda: None)
        elif self._is_ours and self._forgotten:
            self._remove()

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Note that there are new answers, which the next regular write saves."""
        self._has_new = True

    def forgot(self, scope: str | None) -> None:
        """Trigger a write without the forgotten answers. Where writing is switched off, the file is removed instead."""
        self._forgotten.append(scope)
        self._at_once.set()
        if self._is_ours and self._engine.guard.is_off("memory_file"):
            self._remove()

    def _run(self) -> None:
        lower_priority(_NICENESS)
        guard = self._engine.guard
        try:
            with os.fdopen(self._lock()):
                self._is_ours = True
                self._read()
                self._is_read = True
                while not (self._stopping.is_set() or guard.is_off("memory_file")):
                    guard.run("memory_file", self._keep, lambda: None)
                self._stopping.wait()  # holds the lock until the server stops
        except CancelledError:
            return
        except Exception as error:
            logger.error("past answers in %s cannot be read; new answers will not be saved: %s", self.path, error)
            guard.count("memory_file", error)
            guard.switch_off("memory_file")

    def _lock(self) -> int:
        """Lock the file for this process, and return the lock's descriptor. Waits while another process holds it, such
        as the server that this one replaces. Raises CancelledError when the server stops."""
        waits = False
        while True:
            try:
                return lock(key_path(self.path))
            except BlockingIOError:
                if not waits:
                    logger.warning("past answers in %s are in use by another process; waiting until it ends", self.path)
                waits = True
            if self._stopping.wait(_LEAST_PAUSE_SECONDS):
                raise CancelledError

    def _keep(self) -> None:
        """Wait for the pause, or until answers are forgotten, and write the file if there are changes."""
        self._at_once.wait(self._pause)
        forgot = self._at_once.is_set()
        if self._stopping.is_set() or not (forgot or self._has_new):
            return
        self._at_once.clear()
        self._has_new = False
        self._forgotten.clear()
        with suppress(CancelledError):
            self._write(self._between(self._drafter.past.by_scope), self._stopping, forgot=forgot)

    def _write(
        self, past: Iterable[ScopeAnswers], stopping: threading.Event | None = None, *, forgot: bool = False
    ) -> None:
        """Replace the file. If that fails, the old file stays, or is removed if `forgot`, since it may still hold
        forgotten answers."""
        try:
            self._pause = max(_LEAST_PAUSE_SECONDS, self._file.write(past, stopping) / _BYTES_PER_SECOND)
            self._write_failed = False
        except CancelledError:
            raise
        except Exception as error:
            self._has_new = True
            if forgot:
                self._remove()
            if not isinstance(error, OSError):
                raise
            if not self._write_failed:
                logger.error("past answers cannot be saved to %s; serving continues: %s", self.path, error)
            self._write_failed = True

    def _remove(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        """Restore the file's scopes to unused shares, one piece between two steps."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            began = time.monotonic()
            try:
                end = self._file.check(file)
            except ValueError as error:
                aside = self.path.with_name(f"{self.path.name}.set-aside")
                self.path.replace(aside)
                logger.warning("ignoring past answers in %s: %s; the file was renamed to %s", self.path, error, aside)
                return
            count = 0
            while file.tell() < end:
                count += self._restore(*self._file.read_scope(file))
            logger.info("restored past answers of %d scopes in %.1f s", count, time.monotonic() - began)

    def _restore(self, scope: str, weights: Tensor, squares: Tensor, entries: Iterator[tuple[int, Tensor]]) -> bool:
        """Restore one scope; returns whether it got a share. # weights, squares [WEIGHT_SETS, FEATURES]"""
        past = self._between(partial(self._adopt, scope, weights, squares))
        for start, words in entries:
            if past is not None:
                self._between(partial(self._fill, past, start, words))
        return past is not None

    def _adopt(self, scope: str, weights: Tensor, squares: Tensor) -> ScopeAnswers | None:
        past = None if {None, scope} & set(self._forgotten) else self._drafter.past.adopt(scope)
        if past is not None:
            past.weights.copy_(weights)
            past.squares.copy_(squares)
        return past

    def _fill(self, past: ScopeAnswers, start: int, words: Tensor) -> None:
        """Copy words to the buckets that are still empty. # words [buckets, WAYS]"""
        if self._drafter.past.is_current(past):
            buckets = past.entries[start : start + len(words)]
            is_empty = (buckets == 0).all(1, keepdim=True)
            buckets.copy_(torch.where(is_empty, words.to(buckets.device), buckets))

    def _between(self, call: Callable[[], _Result]) -> _Result:
        return self._engine.between_steps(call, self._stopping)


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.reshape(-1).split(_PIECE)


def _tensor(file: BinaryIO, dtype: torch.dtype, count: int) -> Tensor:
    return torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)
