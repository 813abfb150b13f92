"""Resumed streams: what the id of an event holds, and which chunks a client has already received.

An answer is a function of target, prompt, parameters and seed. The server therefore keeps nothing of a broken stream:
it generates the answer again and leaves out what the client has. A position in a choice is a count of tokens and,
within the tokens of one step, a count of chunks. The id of an event holds the positions, the number of events so far,
digests of what must be the same again, and the identity of the answer; behind a `~` it holds the tokens that are new
with this event, with their choice and first position. A client that returns these from all events in a row has the
tokens verified instead of generated.
"""

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from pydantic import BaseModel

from service.api.prompts import check_token_ids
from service.api.reply import merged
from service.api.request_builder import AnswerIdentity, Completion, Job
from service.api.sse import Chunk, Event, EventIds, StreamForm
from service.engine.requests import SequenceOutput
from service.errors import Conflict, InvalidRequest
from service.runtime import Runtime

HEADER = "last-event-id"
_FIELD = "resume_from"
_WIRE = struct.Struct(">16sQq8s8s")  # the identity's uid, time and seed; digests of the model and of the request
_POSITION = re.compile(r"(\d{1,9})(?:\+(\d{1,9}):(\d{1,4}))?")
_COUNT = re.compile(r"\d{1,9}")
_END = "end"
_TOKENS = re.compile(r"(\d{1,9})@(\d{1,9}):(\d{1,9}(?:,\d{1,9})*)")


class StreamPosition(NamedTuple):
    """How much of one choice a client has received."""

    tokens: int = 0  # tokens received completely
    partial: int = 0  # further tokens, which came in several chunks
    chunks: int = 0  # number of these chunks received

    def __str__(self) -> str:
        return f"{self.tokens}+{self.partial}:{self.chunks}" if self.partial else str(self.tokens)


class Digests(NamedTuple):
    """Hashes of what must be unchanged for an answer to be resumed."""

    model: bytes
    request: bytes


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a client has received of an answer."""

    param: str  # the field or header that reports it
    positions: tuple[StreamPosition, ...]  # one per choice
    num_events: int = 0
    has_end: bool = False  # only the end of the stream is missing
    origin: AnswerIdentity | None = None  # None: a bare count does not hold it
    digests: Digests | None = None
    tokens: tuple[tuple[int, ...], ...] = ()  # the first tokens of each choice, as far as the client returns them

    def check(self, job: Job, digests: Digests) -> None:
        """Raise Conflict or InvalidRequest if the answer cannot be resumed with this job."""
        if self.digests is not None and self.digests.model != digests.model:
            raise Conflict(
                f"'{self.param}' belongs to an answer of another model, or under another system_fingerprint.",
                param=self.param,
                code="other_system_fingerprint",
            )
        if self.digests is not None and self.digests.request != digests.request:
            raise Conflict(
                f"'{self.param}' belongs to another request: send the same body again (stream_options may differ).",
                param=self.param,
                code="other_request",
            )
        if self.origin is None and len(job.requests) > 1 and job.requests[0].sampling.temperature:
            message = f"'{self.param}' as counts goes with one prompt, for each has a seed: send the last event's id."
            raise InvalidRequest(message, param=self.param)
        if len(self.positions) != job.num_choices:
            count = f"it counts tokens of {len(self.positions)} choices, and the request has {job.num_choices}"
            raise InvalidRequest(f"Invalid value for '{self.param}': {count}.", param=self.param)


def resume_point(body: Completion, header: str | None) -> ResumePoint | None:
    """The resume point in the field `resume_from` or the header `Last-Event-ID`; None: the stream begins.
    Raises InvalidRequest."""
    value, param = (header, HEADER) if body.resume_from is None else (body.resume_from, _FIELD)
    if value is None:
        return None
    if not body.stream:
        raise InvalidRequest(f"'{param}' is only allowed when 'stream' is true.", param=param)
    if body.speculation is not None and body.speculation.trace:
        reason = "the steps of the first run cannot be repeated, so a trace cannot be resumed."
        raise InvalidRequest(f"'speculation.trace' beside '{param}': {reason}", param="speculation.trace")
    if isinstance(value, str):
        return _parsed(value, param)
    if body.seed is None and body.temperature != 0:
        raise InvalidRequest(f"'{param}' as a count needs the answer's 'seed'.", param="seed")
    return ResumePoint(param, tuple(map(StreamPosition, [value] if isinstance(value, int) else value)))


async def resumable(job: Job, sent: BaseModel, resumed: ResumePoint | None, runtime: Runtime) -> tuple[Job, EventIds]:
    """The job prepared for streaming, and the ids of its events. `sent`: the request's body. Raises RequestError."""
    if job.requests[0].speculation.trace:
        return job, EventIds()
    digests = await runtime.off_loop(partial(_digests_of, job, sent, runtime.card.system_fingerprint))
    if resumed is not None:
        resumed.check(job, digests)
        for tokens in resumed.tokens:
            check_token_ids(tokens, runtime.card, param=resumed.param)
        job = _resumed(job, resumed)
    return job, ResumableIds(job, digests, resumed)


def _digests_of(job: Job, sent: BaseModel, system_fingerprint: str) -> Digests:
    """Digests of the model and the request. Prompts are included, because a template may insert the time; fields that
    only concern streaming are not."""
    fields = sent.model_dump_json(exclude={"stream_options", _FIELD})
    prompts = [(list(request.prompt), request.sampling.max_tokens) for request in job.requests]
    return Digests(_digest(system_fingerprint), _digest(f"{type(sent).__name__} {prompts} {fields}"))


class ResumableIds(EventIds):
    """Events with the ids by which a stream is resumed, without those that its client has received."""

    def __init__(self, job: Job, digests: Digests, resumed: ResumePoint | None) -> None:
        self._job = job
        packed = _WIRE.pack(bytes.fromhex(job.origin.uid), job.origin.created, job.origin.seed, *digests)
        self._head = base64.urlsafe_b64encode(packed).rstrip(b"=").decode()
        self._resumed = resumed or ResumePoint("", (StreamPosition(),) * job.num_choices)
        self.num_received = self._num_events = self._resumed.num_events
        self._positions = [StreamPosition() for _ in range(job.num_choices)]
        self._held: dict[int, list[SequenceOutput]] = {}  # outputs whose chunks the client has in part, by choice
        self._new_tokens: dict[int, list[int]] = {}  # tokens that no id has held yet, by choice

    def events(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]:
        """The events that are new to the client. Raises InvalidRequest if it claims more than the answer has."""
        choice = self._job.choice_of(output)
        received, before = self._resumed.positions[choice], self._positions[choice].tokens
        held = [*self._held.pop(choice, ()), output]
        after = before + sum(len(one.token_ids) for one in held)
        end = received.tokens + received.partial
        if output.finish_reason is not None and after < end:
            reason, param = f"choice {choice} has no more than {after} tokens", self._resumed.param
            raise InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param)
        is_new = before >= received.tokens
        assert is_new or after <= received.tokens, "outputs are cut where the client was cut off"
        if is_new and after < end:
            self._held[choice] = held
            return
        whole = merged(held)
        if is_new:
            self._new_tokens.setdefault(choice, []).extend(whole.token_ids)
        chunks = list(form.chunks(whole))
        num_known = len(chunks) if not is_new else received.chunks if before < end else 0
        for count, chunk in enumerate(chunks, start=1):
            is_last = count == len(chunks)
            self._positions[choice] = (
                StreamPosition(after) if is_last else StreamPosition(before, after - before, count)
            )
            if count > num_known:
                tokens = self._new_tokens.pop(choice, [])
                yield chunk, f"{self._next_id()}{_encoded(choice, after, tokens)}"
        self._positions[choice] = StreamPosition(after)

    def at_end(self, trailer: Iterator[Chunk]) -> Iterator[Event]:
        """The new events after the last output."""
        for chunk in trailer:
            if not self._resumed.has_end:
                yield chunk, f"{self._next_id()}.{_END}"

    def _next_id(self) -> str:
        """The id of the next event, without its new tokens."""
        self._num_events += 1
        # Some choices may not have been generated up to the client's position yet.
        positions = ",".join(map(str, map(max, self._positions, self._resumed.positions)))
        return f"{self._head}.{positions}.{self._num_events}"


def _resumed(job: Job, resumed: ResumePoint) -> Job:
    """The job with outputs cut where the client may have been cut off, and with the tokens that it returned."""
    counts = [position.tokens + position.partial for position in resumed.positions]
    requests = []
    for request in job.requests:
        first = job.first_choice[request.request_id]
        choices = slice(first, first + request.n)
        requests.append(
            replace(
                request,
                single_token_outputs=max(request.single_token_outputs, *counts[choices]),
                replayed=resumed.tokens[choices],
            )
        )
    return replace(job, requests=tuple(requests))


def _encoded(choice: int, end: int, tokens: Sequence[int]) -> str:
    """The part of an id that holds new tokens of a choice; `end`: the position after them."""
    return f"~{choice}@{end - len(tokens)}:{','.join(map(str, tokens))}" if tokens else ""


def _parsed(event_id: str, param: str) -> ResumePoint:
    """The resume point that an event id holds. Raises InvalidRequest."""
    event_id, *tokens = event_id.split("~")
    head, positions, count, end = [*event_id.split(".", 3), "", "", ""][:4]
    matches = [_POSITION.fullmatch(position) for position in positions.split(",")]
    runs = [_TOKENS.fullmatch(run) for run in tokens]
    try:
        uid, created, seed, *digests = _WIRE.unpack(base64.b64decode(head + "=" * (-len(head) % 4), b"-_", True))
    except (binascii.Error, struct.error, ValueError):
        matches = [None]
    if None in matches or None in runs or _COUNT.fullmatch(count) is None or end not in ("", _END):
        raise InvalidRequest(f"Invalid value for '{param}': it is no id of this server's events.", param=param)
    found = tuple(
        StreamPosition(*(int(number or 0) for number in match.groups())) for match in matches if match is not None
    )
    joined = _joined(len(found), (match.groups() for match in runs if match is not None))
    identity = AnswerIdentity(uid.hex(), created, seed)
    return ResumePoint(param, found, int(count), bool(end), identity, Digests(*digests), joined)


def _joined(num_choices: int, runs: Iterable[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """The first tokens of each choice: the runs (choice, start, tokens) without gaps."""
    known: list[list[int]] = [[] for _ in range(num_choices)]
    for choice, start, tokens in runs:
        if int(choice) < num_choices and int(start) == len(known[int(choice)]):
            known[int(choice)] += map(int, tokens.split(","))
    return tuple(map(tuple, known))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
