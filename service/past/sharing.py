"""Exchange of past answers between replicas through Redis, with or without learning.

Every replica adds its signed answers to one bounded stream per tokenizer, and reads the other replicas' answers. Scopes
are keyed hashes, equal in all replicas with the same secret. While Redis cannot be reached, replicas serve without
sharing.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter

from adaptation.config import AdaptationConfig
from adaptation.records import Refused, StoreLost
from adaptation.replicas.redis_store import LEASE_SECONDS, MAX_QUERIES, RedisStore, talk
from adaptation.replicas.wire import sign, verify_record
from drafters.memory.drafter import MAX_ANSWER_TOKENS, MemoryDrafter
from kernels.memory import CONTEXT
from service.engine.thread import EngineThread
from service.errors import StartupError

logger = logging.getLogger(__name__)

_KEPT_ANSWERS = 8 * MAX_QUERIES
"""Answers kept in the stream: a few MiB, and about as many as a busy replica gives while another loads its model."""
_KEPT_SECONDS = 3600  # lifetime of the stream after the last answer
_FIRST = "0-0"
_READ_ANSWERS = 16  # entries read per Redis command
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAnswer:
    """An entry of the stream: an answer to add, or a request to forget a scope."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sender: str
    tokenizer: str  # hash of the vocabulary
    scope: str | None  # None: forget all scopes
    tokens: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=MAX_ANSWER_TOKENS + CONTEXT)] = (
        field(default_factory=list)
    )
    # Number of trailing tokens that are the answer; 0 in a request to forget.
    num_new: Annotated[int, Field(ge=0, le=MAX_ANSWER_TOKENS, strict=True)] = 0


_ANSWER = TypeAdapter(SharedAnswer)


class AnswerStream:
    """The stream in Redis: signs and adds this replica's entries, reads and verifies all replicas' entries."""

    def __init__(self, config: AdaptationConfig, *, tokenizer: str, vocab: int, from_start: bool) -> None:
        """`tokenizer`: hash of the vocabulary; `vocab`: number of tokens; `from_start`: read existing entries too, not
        only later ones. Raises StartupError."""
        assert config.redis_url is not None
        assert config.redis_secret is not None
        self._secret = config.redis_secret.get_secret_value().encode()
        self._tokenizer, self._vocab = tokenizer, vocab
        self.sender = secrets.token_hex(8)  # new at each start of a process
        self.last: bytes | str = _FIRST if from_start else ""  # id of the last entry read; "": not determined yet
        try:
            url, timeout = config.redis_url.get_secret_value(), LEASE_SECONDS / 2
            self.store = RedisStore(url, f"adaptree:{tokenizer[:16]}", name=self.sender, timeout_seconds=timeout)
        except ValueError as error:
            raise StartupError(str(error)) from error
        self._key = f"{self.store.prefix}:answers"

    def entry(self, scope: str | None, tokens: Sequence[int] = (), num_new: int = 0) -> SharedAnswer:
        """Build an entry with this replica as its sender; without tokens, it asks to forget the scope."""
        return SharedAnswer(
            sender=self.sender, tokenizer=self._tokenizer, scope=scope, tokens=list(tokens), num_new=num_new
        )

    def find_newest(self) -> None:
        """Set the position to read from to the newest entry, unless a position is set. Raises StoreLost."""
        if not self.last:
            newest = self.store.command("XREVRANGE", self._key, "+", "-", "COUNT", 1)
            self.last = newest[0][0] if newest else _FIRST

    def send(self, answer: SharedAnswer, *, alone: bool = False) -> None:
        """Sign and add an entry; `alone`: delete the stream first. Raises StoreLost."""
        if alone:
            self.store.command("DEL", self._key)
        data = sign("answer", answer, self._secret)
        self.store.command("XADD", self._key, "MAXLEN", "~", _KEPT_ANSWERS, "*", "answer", data)
        self.store.command("EXPIRE", self._key, _KEPT_SECONDS)

    def read(self) -> Iterator[object]:
        """Yield the raw contents of the entries that have not been read yet. Raises StoreLost."""
        while found := self.store.command("XREAD", "COUNT", _READ_ANSWERS, "STREAMS", self._key, self.last):
            for _, entries in found:
                for entry_id, fields in entries:
                    self.last = entry_id
                    yield dict(fields).get(b"answer")

    def check(self, raw: object) -> SharedAnswer:
        """Verify and parse an entry's raw contents. Raises Refused."""
        if not isinstance(raw, bytes):
            raise Refused("torn", "the entry holds no answer")
        answer = verify_record("answer", _ANSWER, raw, self._secret)
        if answer.tokenizer != self._tokenizer:
            raise Refused("foreign", "the answer belongs to another tokenizer")
        if len(answer.tokens) < answer.num_new or max(answer.tokens, default=0) >= self._vocab:
            raise Refused("misfit", "the answer has tokens outside the vocabulary, or fewer tokens than it states")
        return answer


class SharedAnswers:
    """Exchanges past answers with the other replicas; a listener of the drafter."""

    def __init__(self, stream: AnswerStream, drafter: MemoryDrafter, engine: EngineThread) -> None:
        self.num_sent = self.num_added = self.num_refused = 0
        self._stream, self._drafter, self._engine = stream, drafter, engine
        self._to_send = deque[SharedAnswer](maxlen=MAX_QUERIES)
        self._to_forget = deque[SharedAnswer]()
        self._is_forgetting = False  # applying another replica's request to forget
        self.is_lost = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared answers", daemon=True)
        drafter.past.listeners.append(self)

    def start(self) -> None:
        """Start the thread that sends and reads answers."""
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread. Call it after the engine's last step. Answers still in the queue are dropped."""
        self._stopping.set()
        self._thread.join(LEASE_SECONDS)

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Queue an answer for sending; a full queue drops its oldest answer. Never blocks."""
        self._to_send.append(
            self._stream.entry(scope, tokens[-MAX_ANSWER_TOKENS - CONTEXT :], min(num_new, MAX_ANSWER_TOKENS))
        )

    def forgot(self, scope: str | None) -> None:
        """Queue a request that all replicas forget a scope (None: all scopes); it replaces the stream's entries."""
        waiting = [answer for answer in list(self._to_send) if scope is not None and answer.scope != scope]
        self._to_send.clear()
        self._to_send.extend(waiting)
        if not self._is_forgetting:
            self._to_forget.append(self._stream.entry(scope))

    def _run(self) -> None:
        talk(self._guarded, self._stopping, _NICENESS)
        self._stream.store.close()

    def _guarded(self) -> bool:
        guard = self._engine.guard
        is_connected = guard.run("sharing", self._attempt, lambda: True)
        if guard.is_off("sharing"):
            self._stopping.set()
        return is_connected

    def _attempt(self) -> bool:
        """Send and read once. # -> whether the store answers"""
        try:
            self.step()
        except CancelledError:  # the server stops
            return True
        except StoreLost as error:
            if not self.is_lost:
                logger.warning("past answers are not shared until the store answers again: %s", error)
            self.is_lost = True
            return False
        self.is_lost = False
        return True

    def step(self) -> None:
        """Send the queued entries, then apply the other replicas' new entries, one between two engine steps. Raises
        StoreLost, and CancelledError when the server stops."""
        self._stream.find_newest()
        while self._to_forget:
            self._stream.send(self._to_forget[0], alone=True)
            self._to_forget.popleft()
        with suppress(IndexError):  # the engine's thread may empty the queue meanwhile
            while self._to_send:
                self._stream.send(self._to_send.popleft())
                self.num_sent += 1
        for raw in self._stream.read():
            self._add(raw)

    def _add(self, raw: object) -> None:
        try:
            answer = self._stream.check(raw)
        except Refused as error:
            if not self.num_refused:
                logger.warning("refused a past answer of another replica (further ones are only counted): %s", error)
            self.num_refused += 1
            return
        if answer.sender != self._stream.sender:
            self._engine.between_steps(partial(self._apply, answer), self._stopping)
            self.num_added += 1

    def _apply(self, answer: SharedAnswer) -> None:
        if answer.num_new and answer.scope is not None:
            self._drafter.add_answer(answer.scope, answer.tokens, answer.num_new)
            return
        self._is_forgetting = True
        self._drafter.forget(answer.scope)
        self._is_forgetting = False
