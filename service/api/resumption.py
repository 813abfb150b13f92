"""Resume interrupted streams: what an event id contains, and which chunks a client has already received.

An answer is a function of target, prompt, parameters and seed. The server therefore stores nothing of an interrupted
stream: it generates the answer again and leaves out what the client has received. A position in a choice is a number of
tokens and, within the tokens of one step, a number of chunks. An event id contains the positions, the number of events
so far, digests of model and request, which must be unchanged, and the identity of the answer; after a `~` it contains
the new tokens of this event, with their choice and first position. If a client returns the tokens of all events in a
row, they are verified instead of generated.
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
    """Part of one choice that a client has received."""

    tokens: int = 0  # tokens received completely
    partial: int = 0  # further tokens, sent in several chunks of which some are missing
    chunks: int = 0  # number of these chunks received

    def __str__(self) -> str:
        return f"{self.tokens}+{self.partial}:{self.chunks}" if self.partial else str(self.tokens)


class Digests(NamedTuple):
    """Hashes that must be unchanged for an answer to be resumed."""

    model: bytes
    request: bytes


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Part of an answer that a client has received, as the client reports it."""

    param: str  # field or header that the client sent
    positions: tuple[StreamPosition, ...]  # one per choice
    num_events: int = 0
    has_end: bool = False  # only the end of the stream is missing
    origin: AnswerIdentity | None = None  # None if the client sent bare token counts
    digests: Digests | None = None
    tokens: tuple[tuple[int, ...], ...] = ()  # first tokens of each choice that the client returned

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
            message = f"Counts in '{self.param}' work with a single prompt only: send the last event's id."
            raise InvalidRequest(message, param=self.param)
        if len(self.positions) != job.num_choices:
            count = f"it counts tokens of {len(self.positions)} choices, but the request has {job.num_choices}"
            raise InvalidRequest(f"Invalid value for '{self.param}': {count}.", param=self.param)


def resume_point(body: Completion, header: str | None) -> ResumePoint | None:
    """Return the resume point in the field `resume_from` or the header `Last-Event-ID`, or None if there is none.
    Raises InvalidRequest."""
    value, param = (header, HEADER) if body.resume_from is None else (body.resume_from, _FIELD)
    if value is None:
        return None
    if not body.stream:
        raise InvalidRequest(f"'{param}' is only allowed when 'stream' is true.", param=param)
    if body.speculation is not None and body.speculation.trace:
        reason = f"cannot be combined with '{param}': the steps of the first run cannot be repeated."
        raise InvalidRequest(f"'speculation.trace' {reason}", param="speculation.trace")
    if isinstance(value, str):
        return _parsed(value, param)
    if body.seed is None and body.temperature != 0:
        raise InvalidRequest(f"'{param}' as a token count needs the 'seed' of the answer.", param="seed")
    return ResumePoint(param, tuple(map(StreamPosition, [value] if isinstance(value, int) else value)))


async def resumable(job: Job, sent: BaseModel, resumed: ResumePoint | None, runtime: Runtime) -> tuple[Job, EventIds]:
    """Prepare a job for streaming. Returns it with the ids of its events. `sent`: the request's body. Raises
    RequestError."""
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
    """Compute the digests of model and request. They cover the encoded prompts, because a template may insert the time,
    but no fields that only concern streaming."""
    fields = sent.model_dump_json(exclude={"stream_options", _FIELD})
    prompts = [(list(request.prompt), request.sampling.max_tokens) for request in job.requests]
    return Digests(_digest(system_fingerprint), _digest(f"{type(sent).__name__} {prompts} {fields}"))


class ResumableIds(EventIds):
    """Assigns the ids by which a stream can be resumed, and drops the events that the client has received."""

    def __init__(self, job: Job, digests: Digests, resumed: ResumePoint | None) -> None:
        self._job = job
        packed = _WIRE.pack(bytes.fromhex(job.origin.uid), job.origin.created, job.origin.seed, *digests)
        self._head = base64.urlsafe_b64encode(packed).rstrip(b"=").decode()
        self._resumed = resumed or ResumePoint("", (StreamPosition(),) * job.num_choices)
        self.num_received = self._num_events = self._resumed.num_events
        self._positions = [StreamPosition() for _ in range(job.num_choices)]
        self._held: dict[int, list[SequenceOutput]] = {}  # outputs that the client has in part, by choice
        self._new_tokens: dict[int, list[int]] = {}  # tokens not yet sent in an event id, by choice

    def events(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]:
        """Yield the events that are new to the client. Raises InvalidRequest if the client claims more tokens than the
        answer has."""
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
        """Yield the new events after the last output."""
        for chunk in trailer:
            if not self._resumed.has_end:
                yield chunk, f"{self._next_id()}.{_END}"

    def _next_id(self) -> str:
        """Return the id of the next event, without its new tokens."""
        self._num_events += 1
        # Some choices may not have been generated up to the client's position yet.
        positions = ",".join(map(str, map(max, self._positions, self._resumed.positions)))
        return f"{self._head}.{positions}.{self._num_events}"


def _resumed(job: Job, resumed: ResumePoint) -> Job:
    """Return the job with one output per token up to the client's position, and with the tokens that the client
    returned."""
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
    """Encode new tokens of a choice as the last part of an event id; `end`: the position after them."""
    return f"~{choice}@{end - len(tokens)}:{','.join(map(str, tokens))}" if tokens else ""


def _parsed(event_id: str, param: str) -> ResumePoint:
    """Parse an event id. Raises InvalidRequest."""
    event_id, *tokens = event_id.split("~")
    head, positions, count, end = [*event_id.split(".", 3), "", "", ""][:4]
    matches = [_POSITION.fullmatch(position) for position in positions.split(",")]
    runs = [_TOKENS.fullmatch(run) for run in tokens]
    try:
        uid, created, seed, *digests = _WIRE.unpack(base64.b64decode(head + "=" * (-len(head) % 4), b"-_", True))
    except (binascii.Error, struct.error, ValueError):
        matches = [None]
    if None in matches or None in runs or _COUNT.fullmatch(count) is None or end not in ("", _END):
        raise InvalidRequest(f"Invalid value for '{param}': it is not an event id of this server.", param=param)
    found = tuple(
        StreamPosition(*(int(number or 0) for number in match.groups())) for match in matches if match is not None
    )
    joined = _joined(len(found), (match.groups() for match in runs if match is not None))
    identity = AnswerIdentity(uid.hex(), created, seed)
    return ResumePoint(param, found, int(count), bool(end), identity, Digests(*digests), joined)


def _joined(num_choices: int, runs: Iterable[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """Join runs (choice, start, tokens) to the first tokens of each choice; runs after a gap are left out."""
    known: list[list[int]] = [[] for _ in range(num_choices)]
    for choice, start, tokens in runs:
        if int(choice) < num_choices and int(start) == len(known[int(choice)]):
            known[int(choice)] += map(int, tokens.split(","))
    return tuple(map(tuple, known))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
