"""Past answers in a file, over restarts.

    one line of JSON: what the answers fit | per scope: one line of JSON, weights, squares, entries | keyed hash of all

The file is written beside its place, then renamed: whenever the process dies the old one or the new one is there. Its
hash is keyed by a secret that lies beside it. One process keeps a file, another one waits for it.
"""

import hashlib
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

from adaptation.checkpoint import sync_folder
from adaptation.worker import lower_priority
from drafters.memory.drafter import MemoryDrafter, PastAnswers
from kernels.memory import FEATURES, KINDS, WAYS
from service.engine.thread import EngineThread
from service.errors import StartupError

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_FORMAT = 1
_KEY_BYTES = 32
_HASH_BYTES = 32
_PIECE = 1 << 17  # words: a mebibyte, which the engine's thread takes in within a tenth of a step
_LONGEST_LINE = 1 << 16
_BYTES_PER_SECOND = 1 << 20
"""Written on average: the default memory once a minute. 86 GiB a day are a third of what a disk of 1 TB is made for,
and take a disk of 100 MiB/s a hundredth of its time."""
_LEAST_PAUSE_SECONDS = 1.0
_NICENESS = 10
_WEIGHTS_SHAPE = (KINDS, FEATURES)


def key_beside(file: Path) -> bytes:
    """The secret of a file of past answers, made where there is none. Raises StartupError."""
    place = file.with_name(f"{file.name}.key")
    try:
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            beside = place.with_name(f".{place.name}.{os.getpid()}")
            with _new_file(beside) as handle:
                _finish(handle, secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(beside, place)
            beside.unlink()
        key = place.read_bytes()
    except OSError as error:
        raise StartupError(f"memory_file: its key {place} cannot be had: {error}") from error
    if len(key) != _KEY_BYTES:
        raise StartupError(f"memory_file: {place} is no key of {_KEY_BYTES} bytes: remove it, and past answers with it")
    return key


class MemoryFile:
    """Keeps what a drafter remembers of past answers; hears of new and of forgotten ones as its listener.

    Its thread copies entries while steps write them. Each 8-byte word is valid by itself, as kernels/memory.py has it,
    so that a copy holds some words of before a step and some of after it; of a device's memory each piece is a copy of
    its own on the host. A share that begins again meanwhile, maybe for another scope, is left out.
    """

    def __init__(
        self, path: Path, drafter: MemoryDrafter, engine: EngineThread, *, tokenizer: str, names: bytes
    ) -> None:
        """`tokenizer`: a hash of what tokens mean; `names`: the key that scopes are named with. Raises StartupError."""
        self.path = path
        self._secret = key_beside(path)
        self._drafter, self._engine = drafter, engine
        named = hmac.digest(self._secret, names, "sha256").hex()
        sizes = [drafter.share_buckets, WAYS, *_WEIGHTS_SHAPE]
        self._fits = {"format": _FORMAT, "tokenizer": tokenizer, "sizes": sizes, "names": named}
        self._pause = _LEAST_PAUSE_SECONDS
        self._has_new, self._stopping = False, threading.Event()
        self._at_once = threading.Event()  # something was forgotten, or this stops
        self._forgotten: list[str | None] = []  # until the file has been read
        self._is_ours = self._is_read = self._is_told = False
        self._thread = threading.Thread(target=self._run, name="memory file", daemon=True)
        drafter.listeners.append(self)

    def start(self) -> None:
        """Begin to fill the memory from the file, then to keep it there."""
        self._thread.start()

    def finish(self) -> None:
        """Keep what there is now. Called when the engine takes no more steps."""
        self._stopping.set()
        self._at_once.set()
        self._thread.join()
        if self._is_read:
            self._write(self._drafter.past_answers())
        elif self._is_ours and self._forgotten:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        self._has_new = True

    def forgot(self, scope: str | None) -> None:
        """Let the file have no more of it than the memory."""
        self._forgotten.append(scope)
        self._at_once.set()

    def _run(self) -> None:
        lower_priority(_NICENESS)
        with suppress(CancelledError):
            try:
                with self.path.with_name(f"{self.path.name}.key").open("rb") as key:
                    self._lock(key)
                    self._is_ours = True
                    self._read()
                    self._is_read = True
                    while True:
                        self._keep()
            except OSError as error:
                logger.error("past answers in %s cannot be read, and are not kept: %s", self.path, error)

    def _lock(self, key: BinaryIO) -> None:
        """Wait until no other process keeps the file, such as the one that this one takes over from."""
        try:
            import fcntl
        except ImportError:  # Windows has none
            return
        waits = False
        while True:
            try:
                fcntl.flock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waits:
                    logger.warning("past answers in %s are kept by another process: waiting for its end", self.path)
                waits = True
                if self._stopping.wait(_LEAST_PAUSE_SECONDS):
                    raise CancelledError from None
            else:
                return

    def _keep(self) -> None:
        """Wait until there is something to write, and write it. Raises CancelledError at the end."""
        self._at_once.wait(self._pause)
        if self._stopping.is_set():
            raise CancelledError
        forgot = self._at_once.is_set()
        if not (forgot or self._has_new):
            return
        self._at_once.clear()
        self._has_new = False
        self._forgotten.clear()
        self._write(self._between(self._drafter.past_answers), self._stopping, forgot=forgot)

    def _write(
        self, past: Iterable[PastAnswers], unless: threading.Event | None = None, *, forgot: bool = False
    ) -> None:
        """Replace the file. Where that cannot be, what was there stays, unless something of it was forgotten."""
        beside = self.path.with_name(f".{self.path.name}.new")
        try:
            with _new_file(beside) as file:
                mac = self._put(file, past, unless)
                _finish(file, mac)
                self._pause = max(_LEAST_PAUSE_SECONDS, file.tell() / _BYTES_PER_SECOND)
            beside.replace(self.path)
            sync_folder(self.path.parent)
            self._is_told = False
        except OSError as error:
            if not self._is_told:
                logger.error("past answers cannot be kept in %s, serving goes on: %s", self.path, error)
            self._is_told = self._has_new = True
            with suppress(OSError):
                beside.unlink(missing_ok=True)
                if forgot:
                    self.path.unlink(missing_ok=True)

    def _put(self, file: BinaryIO, past: Iterable[PastAnswers], unless: threading.Event | None) -> bytes:
        """Write all but the hash. # -> the hash"""
        mac = self._hash()

        def put(data: bytes) -> None:
            file.write(data)
            mac.update(data)

        put(_line(self._fits))
        for one in past:
            start, before = file.tell(), mac.copy()
            put(_line({"scope": one.scope}))
            for piece in _pieces((one.weights, one.squares, one.entries)):
                if unless is not None and unless.is_set():
                    raise CancelledError
                put(piece.cpu().numpy().tobytes())
            if not self._drafter.is_current(one):
                file.seek(start)
                file.truncate()
                mac = before
        return mac.digest()

    def _read(self) -> None:
        """Fill unused shares from the file, piece by piece, between two steps each."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            began = time.monotonic()
            try:
                end = self._checked(file)
            except ValueError as error:
                aside = self.path.with_name(f"{self.path.name}.set-aside")
                self.path.replace(aside)
                logger.warning("past answers in %s are not used: %s; the file is now %s", self.path, error, aside)
                return
            count = 0
            while file.tell() < end:
                count += self._read_scope(file)
            logger.info("past answers of %d scopes are back after %.1f s", count, time.monotonic() - began)

    def _checked(self, file: BinaryIO) -> int:
        """Where the hash of a file begins that can be used; the file is then read behind its first line. Raises
        ValueError."""
        end = file.seek(0, os.SEEK_END) - _HASH_BYTES
        file.seek(0)
        first = file.readline(_LONGEST_LINE)
        try:
            fits = json.loads(first)
        except (ValueError, RecursionError):
            fits = None
        if not isinstance(fits, dict) or "format" not in fits:
            raise ValueError("it is no file of past answers")
        if others := [name for name, value in self._fits.items() if fits.get(name) != value]:
            raise ValueError(f"it was written with another {', '.join(others)}")
        mac, left = self._hash(), end - len(first)
        mac.update(first)
        while left > 0 and (data := file.read(min(left, 8 * _PIECE))):
            mac.update(data)
            left -= len(data)
        if not hmac.compare_digest(mac.digest(), file.read()):
            raise ValueError("it is damaged, or was written with another key")
        file.seek(len(first))
        return end

    def _read_scope(self, file: BinaryIO) -> bool:
        """Give a scope what was remembered of it. # -> whether there was room"""
        scope: str = json.loads(file.readline(_LONGEST_LINE))["scope"]
        weights, squares = (_tensor(file, torch.float32, KINDS * FEATURES).view(_WEIGHTS_SHAPE) for _ in range(2))
        past = self._between(partial(self._adopt, scope, weights, squares))
        for start in range(0, self._drafter.share_buckets, _PIECE // WAYS):
            count = min(_PIECE // WAYS, self._drafter.share_buckets - start)
            words = _tensor(file, torch.int64, count * WAYS).view(count, WAYS)
            if past is not None:
                self._between(partial(self._fill, past, start, words))
        return past is not None

    def _adopt(self, scope: str, weights: Tensor, squares: Tensor) -> PastAnswers | None:
        past = None if {None, scope} & set(self._forgotten) else self._drafter.adopt(scope)
        if past is not None:
            past.weights.copy_(weights)
            past.squares.copy_(squares)
        return past

    def _fill(self, past: PastAnswers, start: int, words: Tensor) -> None:
        """Put these where nothing has been remembered since the start. # words [buckets, WAYS]"""
        if self._drafter.is_current(past):
            buckets = past.entries[start : start + len(words)]
            is_empty = (buckets == 0).all(1, keepdim=True)
            buckets.copy_(torch.where(is_empty, words.to(buckets.device), buckets))

    def _between(self, call: Callable[[], _Result]) -> _Result:
        return self._engine.between_steps(call, self._stopping)

    def _hash(self) -> "hashlib.blake2b":
        return hashlib.blake2b(key=self._secret, digest_size=_HASH_BYTES)


def _new_file(path: Path) -> BinaryIO:
    """A file of no earlier process, for the server's user alone."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _finish(file: BinaryIO, data: bytes) -> None:
    """Write the last of a file and wait until the disk has it."""
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        yield from tensor.reshape(-1).split(_PIECE)


def _tensor(file: BinaryIO, dtype: torch.dtype, count: int) -> Tensor:
    return torch.frombuffer(bytearray(file.read(count * dtype.itemsize)), dtype=dtype)
