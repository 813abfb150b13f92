"""Streams that are taken up again: what an event's id says, and which chunks a client has already.

An answer is a function of target, prompt, parameters and seed, so nothing is kept of a stream that broke off: it is
generated again, and what its client has is left out. A place is a count of tokens for each choice, and within what came
of one step a count of chunks. An event's id holds the places, how many events there have been, digests of what must be
the same again, and what was drawn by chance; and behind a `~` the tokens that are new with this event, of which choice
and from where on. Whoever sends these back, of all events in a row, has them verified together instead of generated.
"""

import base64
import binascii
import hashlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from pydantic import BaseModel

from service.api.request_builder import Completion, Job, Origin, check_token_ids
from service.api.sse import Chunk, Event, Marks, StreamForm
from service.engine.requests import SequenceOutput
from service.errors import Conflict, InvalidRequest, RequestError
from service.runtime import Runtime

HEADER = "last-event-id"
_FIELD = "resume_from"
_WIRE = struct.Struct(">16sQq8s8s")  # id and time of creation of the answer, seed, digests of the model and the request
_PLACE = re.compile(r"(\d{1,9})(?:\+(\d{1,9}):(\d{1,4}))?")
_COUNT = re.compile(r"\d{1,9}")
_END = "end"
_SAID = re.compile(r"(\d{1,9})@(\d{1,9}):(\d{1,9}(?:,\d{1,9})*)")


class Place(NamedTuple):
    """How much of one choice a client has."""

    tokens: int = 0  # of which it has everything
    more: int = 0  # tokens behind them, which came in several chunks
    chunks: int = 0  # of these it has so many

    def __str__(self) -> str:
        return f"{self.tokens}+{self.more}:{self.chunks}" if self.more else str(self.tokens)


class Digests(NamedTuple):
    """Of what must be the same for an answer to go on."""

    model: bytes
    asked: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """What a client says it has of an answer."""

    param: str  # where it says so
    places: tuple[Place, ...]
    num_events: int = 0
    has_end: bool = False  # nothing but the end of the stream is left
    origin: Origin | None = None  # None: a mere count says nothing of it
    digests: Digests | None = None
    said: tuple[tuple[int, ...], ...] = ()  # tokens that each choice begins with, as far as the client tells them

    def check(self, job: Job, digests: Digests) -> None:
        """Raise what keeps this answer from going on."""
        if self.digests is not None and self.digests.model != digests.model:
            raise Conflict(
                f"'{self.param}' belongs to an answer of another model, or under another system_fingerprint.",
                param=self.param,
                code="other_system_fingerprint",
            )
        if self.digests is not None and self.digests.asked != digests.asked:
            raise Conflict(
                f"'{self.param}' belongs to another request: send the same body again (stream_options may differ).",
                param=self.param,
                code="other_request",
            )
        if self.origin is None and len(job.requests) > 1 and job.requests[0].sampling.temperature:
            message = f"'{self.param}' as counts goes with one prompt, for each has a seed: send the last event's id."
            raise InvalidRequest(message, param=self.param)
        if len(self.places) != job.num_choices:
            count = f"it counts tokens of {len(self.places)} choices, and the request has {job.num_choices}"
            raise InvalidRequest(f"Invalid value for '{self.param}': {count}.", param=self.param)


def taken_by(body: Completion, header: str | None) -> Taken | None:
    """What the client of a stream has of it, by the field or by the header of clients that reconnect. Raises
    InvalidRequest."""
    value, param = (header, HEADER) if body.resume_from is None else (body.resume_from, _FIELD)
    if value is None:
        return None
    if not body.stream:
        raise InvalidRequest(f"'{param}' is only allowed when 'stream' is true.", param=param)
    if body.speculation is not None and body.speculation.trace:
        reason = "what steps did cannot be told again: a trace cannot go on."
        raise InvalidRequest(f"'speculation.trace' beside '{param}': {reason}", param="speculation.trace")
    if isinstance(value, str):
        return _parsed(value, param)
    if body.seed is None and body.temperature != 0:
        raise InvalidRequest(f"'{param}' as a count needs the answer's 'seed'.", param="seed")
    return Taken(param, tuple(map(Place, [value] if isinstance(value, int) else value)))


async def marked(job: Job, asked: BaseModel, taken: Taken | None, runtime: Runtime) -> tuple[Job, Marks]:
    """The job as its stream needs it, and the marks of that. `asked`: the body as it came. Raises RequestError."""
    if job.requests[0].speculation.trace:
        return job, Unmarked()
    digests = await runtime.off_loop(partial(_digests_of, job, asked, runtime.card.system_fingerprint))
    if taken is not None:
        taken.check(job, digests)
        for tokens in taken.said:
            check_token_ids(tokens, runtime.card, param=taken.param)
        job = _resumed(job, taken)
    return job, Marked(job, digests, taken)


def _digests_of(job: Job, asked: BaseModel, system_fingerprint: str) -> Digests:
    """Of a request: all fields but how it streams; and its prompts, for a template may tell the time."""
    fields = asked.model_dump_json(exclude={"stream_options", _FIELD})
    prompts = [(list(request.prompt), request.sampling.max_tokens) for request in job.requests]
    return Digests(_digest(system_fingerprint), _digest(f"{type(asked).__name__} {prompts} {fields}"))


class Unmarked:
    """Events without ids."""

    num_taken = 0

    def told(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]:
        return ((chunk, None) for chunk in form.chunks(output))

    def ends(self, trailer: Iterator[Chunk]) -> Iterator[Event]:
        return ((chunk, None) for chunk in trailer)


class Marked:
    """The events of one stream with their ids, without those that its client has already."""

    def __init__(self, job: Job, digests: Digests, taken: Taken | None) -> None:
        self._first_choice = job.first_choice
        origin = job.origin
        packed = _WIRE.pack(bytes.fromhex(origin.uid), origin.created, origin.seed, *digests)
        self._head = base64.urlsafe_b64encode(packed).rstrip(b"=").decode()
        self._param = "" if taken is None else taken.param
        self._taken = (Place(),) * job.num_choices if taken is None else taken.places
        self._has_end = taken is not None and taken.has_end
        self.num_taken = 0 if taken is None else taken.num_events
        self._num_events = self.num_taken
        self._places = [Place() for _ in range(job.num_choices)]
        self._held: dict[int, list[SequenceOutput]] = {}  # outputs of which the client has some chunks, by choice
        self._unmarked: dict[int, list[int]] = {}  # tokens behind the last event with an id, by choice

    def told(self, output: SequenceOutput, form: StreamForm) -> Iterator[Event]:
        """What is new to the client. Raises InvalidRequest when it claims more than there is."""
        choice = self._first_choice[output.request_id] + output.index
        taken, before = self._taken[choice], self._places[choice].tokens
        held = [*self._held.pop(choice, ()), output]
        after = before + sum(len(one.token_ids) for one in held)
        if output.finish_reason is not None and after < taken.tokens + taken.more:
            raise self._beyond(choice, after)
        begins_behind = before >= taken.tokens
        assert begins_behind or after <= taken.tokens, "outputs are cut where the client was cut off"
        if begins_behind and after < taken.tokens + taken.more:
            self._held[choice] = held
            return
        merged = _merged(held)
        if begins_behind:
            self._unmarked.setdefault(choice, []).extend(merged.token_ids)
        chunks = list(form.chunks(merged))
        known = len(chunks) if not begins_behind else taken.chunks if before < taken.tokens + taken.more else 0
        for count, chunk in enumerate(chunks, start=1):
            is_last = count == len(chunks)
            self._places[choice] = Place(after) if is_last else Place(before, after - before, count)
            if count > known:
                said = self._unmarked.pop(choice, [])
                yield chunk, f"{self._id()}{_worded(choice, after, said)}"
        self._places[choice] = Place(after)

    def ends(self, trailer: Iterator[Chunk]) -> Iterator[Event]:
        for chunk in trailer:
            if not self._has_end:
                yield chunk, f"{self._id()}.{_END}"

    def _id(self) -> str:
        """Of the next event."""
        self._num_events += 1
        # Some choices may not have been generated as far again as the client has them.
        places = ",".join(map(str, map(max, self._places, self._taken)))
        return f"{self._head}.{places}.{self._num_events}"

    def _beyond(self, choice: int, tokens: int) -> RequestError:
        reason = f"choice {choice} has no more than {tokens} tokens"
        return InvalidRequest(f"Invalid value for '{self._param}': {reason}.", param=self._param)


def _resumed(job: Job, taken: Taken) -> Job:
    """The job with its outputs cut wherever a client may have been cut off, and told what it has said."""
    counts = [place.tokens + place.more for place in taken.places]
    requests = []
    for request in job.requests:
        first = job.first_choice[request.request_id]
        choices = slice(first, first + request.n)
        requests.append(
            replace(
                request,
                single_token_outputs=max(request.single_token_outputs, *counts[choices]),
                replayed=taken.said[choices],
            )
        )
    return replace(job, requests=tuple(requests))


def _worded(choice: int, after: int, said: Sequence[int]) -> str:
    """What an id says of the tokens that end so many tokens behind the choice's beginning."""
    return f"~{choice}@{after - len(said)}:{','.join(map(str, said))}" if said else ""


def _merged(outputs: Sequence[SequenceOutput]) -> SequenceOutput:
    """One output of several that follow each other."""
    if len(outputs) == 1:
        return outputs[0]
    has_logprobs = outputs[-1].logprobs is not None
    return replace(
        outputs[-1],
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        logprobs=tuple(chain.from_iterable(output.logprobs or () for output in outputs)) if has_logprobs else None,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


def _parsed(event_id: str, param: str) -> Taken:
    """Raises InvalidRequest."""
    event_id, *said = event_id.split("~")
    head, places, count, end = [*event_id.split(".", 3), "", "", ""][:4]
    matches = [_PLACE.fullmatch(place) for place in places.split(",")]
    runs = [_SAID.fullmatch(run) for run in said]
    try:
        uid, created, seed, model, asked = _WIRE.unpack(base64.b64decode(head + "=" * (-len(head) % 4), b"-_", True))
    except (binascii.Error, struct.error, ValueError):
        matches = [None]
    if None in matches or None in runs or _COUNT.fullmatch(count) is None or end not in ("", _END):
        raise InvalidRequest(f"Invalid value for '{param}': it is no id of this server's events.", param=param)
    found = tuple(Place(*(int(number or 0) for number in match.groups())) for match in matches if match is not None)
    known = _known(len(found), (match.groups() for match in runs if match is not None))
    return Taken(param, found, int(count), bool(end), Origin(uid.hex(), created, seed), Digests(model, asked), known)


def _known(num_choices: int, runs: Iterable[Sequence[str]]) -> tuple[tuple[int, ...], ...]:
    """What each choice begins with: of runs (choice, start, tokens) those that follow each other without a gap."""
    known: list[list[int]] = [[] for _ in range(num_choices)]
    for choice, start, tokens in runs:
        if int(choice) < num_choices and int(start) == len(known[int(choice)]):
            known[int(choice)] += map(int, tokens.split(","))
    return tuple(map(tuple, known))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
