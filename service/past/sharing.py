"""Past answers that replicas share through Redis, with or without learning.

Every replica adds what its sequences answered to one bounded stream per tokenizer, signed, and reads what the others
added. Scopes are keyed hashes, equal in all that have the secret. A thread of its own talks to Redis: a lost one costs
sharing only.
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from adaptation.config import AdaptationConfig
from adaptation.records import Refused, StoreLost
from adaptation.replicas.redis_store import LEASE_SECONDS, MAX_QUERIES, RedisStore
from adaptation.replicas.wire import sign, verify
from adaptation.worker import lower_priority
from drafters.memory.drafter import ANSWERED, MemoryDrafter
from kernels.memory import CONTEXT
from service.engine.thread import EngineThread
from service.errors import StartupError

logger = logging.getLogger(__name__)

_KEPT_ANSWERS = 8 * MAX_QUERIES
"""In the stream: of 512 tokens each some MiB, and as many as a busy server gives while another one loads its model."""
_KEPT_SECONDS = 3600  # after the last answer of any replica
_FIRST = "0-0"
_READ_ANSWERS = 16  # at once
_STEP_SECONDS = 0.1
_LOST_SECONDS = 2.0  # between two tries
_NICENESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What travels."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    sender: str
    tokenizer: str  # a hash of what tokens mean
    scope: str | None  # None: of all, to be forgotten
    tokens: Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(max_length=ANSWERED + CONTEXT)] = field(
        default_factory=list
    )
    num_new: Annotated[int, Field(ge=0, le=ANSWERED, strict=True)] = (
        0  # of them, at the end, is the answer; 0: the scope is forgotten
    )


_ANSWER = TypeAdapter(_Answer)


class SharedAnswers:
    """One replica's part; a listener of its drafter."""

    def __init__(
        self,
        config: AdaptationConfig,
        drafter: MemoryDrafter,
        engine: EngineThread,
        *,
        tokenizer: str,
        vocab: int,
        knows_earlier: bool = False,
    ) -> None:
        """`tokenizer`: a hash of what tokens mean; `vocab`: tokens there are; `knows_earlier`: answers that are there
        already, which a file has kept. Raises StartupError."""
        assert config.redis_url is not None
        assert config.redis_secret is not None
        self.num_sent = self.num_added = self.num_refused = self.num_lost = 0
        self._secret = config.redis_secret.get_secret_value().encode()
        self._drafter, self._engine = drafter, engine
        self._tokenizer, self._vocab = tokenizer, vocab
        self._name = secrets.token_hex(8)  # no other start of any process has this one
        self._stream = f"adaptree:{tokenizer[:16]}:answers"
        self._last: bytes | str = "" if knows_earlier else _FIRST  # entry that was read; "": the newest that there is
        self._to_send = deque[_Answer](maxlen=MAX_QUERIES)
        self._to_forget = deque[_Answer]()
        self._is_told = False  # to forget, by another one
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared answers", daemon=True)
        try:
            url, timeout = config.redis_url.get_secret_value(), LEASE_SECONDS / 2
            self._store = RedisStore(url, self._stream, name=self._name, timeout_seconds=timeout)
        except ValueError as error:
            raise StartupError(f"adaptation.redis_url cannot be used: {error}") from error
        drafter.listeners.append(self)

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """Called when the engine takes no more steps; what is not sent by then is not shared."""
        self._stopping.set()
        self._thread.join(LEASE_SECONDS)

    def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
        """Send it when the thread gets to it; the oldest make room. Never waits."""
        kept, new = list(tokens[-ANSWERED - CONTEXT :]), min(num_new, ANSWERED)
        self._to_send.append(
            _Answer(sender=self._name, tokenizer=self._tokenizer, scope=scope, tokens=kept, num_new=new)
        )

    def forgot(self, scope: str | None) -> None:
        """Let all replicas forget it, and the stream."""
        waiting = [answer for answer in list(self._to_send) if scope is not None and answer.scope != scope]
        self._to_send.clear()
        self._to_send.extend(waiting)
        if not self._is_told:
            self._to_forget.append(_Answer(sender=self._name, tokenizer=self._tokenizer, scope=scope))

    def _run(self) -> None:
        lower_priority(_NICENESS)
        is_lost = False
        while not self._stopping.is_set():
            try:
                self.step()
                is_lost = False
            except CancelledError:
                break
            except StoreLost as error:
                if not is_lost:
                    logger.warning("past answers are not shared at present: %s", error)
                    self.num_lost += 1
                is_lost = True
            self._stopping.wait(_LOST_SECONDS if is_lost else _STEP_SECONDS)
        self._store.close()

    def step(self) -> None:
        """Send what waits, then add what others have sent since, one answer between two steps. Raises StoreLost, and
        CancelledError at the end."""
        if not self._last:
            newest = self._store.command("XREVRANGE", self._stream, "+", "-", "COUNT", 1)
            self._last = newest[0][0] if newest else _FIRST
        while self._to_forget:
            self._store.command("DEL", self._stream)  # answers of others that are lost by it cost sharing only
            self._send(self._to_forget[0])
            self._to_forget.popleft()
        with suppress(IndexError):  # the engine's thread may forget meanwhile
            while self._to_send:
                self._send(self._to_send.popleft())
                self.num_sent += 1
        while entries := self._read():
            for entry_id, raw in entries:
                self._add(raw)
                self._last = entry_id

    def _send(self, answer: _Answer) -> None:
        data = sign("answer", answer, self._secret)
        self._store.command("XADD", self._stream, "MAXLEN", "~", _KEPT_ANSWERS, "*", "answer", data)
        self._store.command("EXPIRE", self._stream, _KEPT_SECONDS)

    def _read(self) -> list[tuple[bytes, Any]]:
        """The next entries: their ids, and what is in them."""
        found = self._store.command("XREAD", "COUNT", _READ_ANSWERS, "STREAMS", self._stream, self._last) or []
        return [(entry_id, dict(fields).get(b"answer")) for _, entries in found for entry_id, fields in entries]

    def _add(self, raw: object) -> None:
        try:
            answer = self._checked(raw)
        except Refused as error:
            if not self.num_refused:
                logger.warning("past answers of others are refused: %s", error)
            self.num_refused += 1
            return
        if answer.sender != self._name:
            self._engine.between_steps(partial(self._take_in, answer), self._stopping)
            self.num_added += 1

    def _take_in(self, answer: _Answer) -> None:
        if answer.num_new and answer.scope is not None:
            self._drafter.add_answer(answer.scope, answer.tokens, answer.num_new)
            return
        self._is_told = True
        self._drafter.forget(answer.scope)
        self._is_told = False

    def _checked(self, raw: object) -> _Answer:
        """Raises Refused."""
        if not isinstance(raw, bytes):
            raise Refused("torn", "an entry without an answer")
        try:
            answer = _ANSWER.validate_python(verify("answer", raw, self._secret))
        except ValidationError as error:
            raise Refused("torn", "an answer that lacks something") from error
        if answer.tokenizer != self._tokenizer:
            raise Refused("foreign", "an answer of another tokenizer")
        if len(answer.tokens) < answer.num_new or max(answer.tokens, default=0) >= self._vocab:
            raise Refused("misfit", "an answer of tokens that there are not")
        return answer
