"""`python -m benchmarks inputs`: bad requests to a real server. None may end in a 5xx, hang or harm other requests.

Each starts as a valid request, of which parts are mutated: JSON fields are replaced, removed, added or swapped; headers
are changed; bytes of the body or of the whole HTTP message are flipped, removed or doubled. It is sent over its own
connection, whose sending half the client then closes.
"""

import asyncio
import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer

from benchmarks.shared import in_one_line
from benchmarks.streams import answers_alone, questions, slots_at_rest
from service.bench.commands import Concurrency, Out, Seed
from service.bench.experiment import Row, counted, report, table_of
from service.bench.servers import one_server
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig

_ORIGINALS = Path(__file__).with_suffix(".json")
_PATIENCE_SECONDS = 60.0
_SHORT_ANSWERS = 16  # tokens by default
_MOST_CHANGES = 3
_SHOWN = 5  # requests that went wrong
_SHOWN_BYTES = 600
_VERSION = b"HTTP/1.1 "
_ERROR_FIELDS = {"message", "type", "param", "code"}


class Original(NamedTuple):
    """A valid request."""

    method: str
    path: str
    body: dict[str, Any] | None = None


class Sent(NamedTuple):
    """A mutated request, as bytes of a connection."""

    way: str  # what was mutated
    data: bytes


def originals(model: str) -> list[Original]:
    """Return good requests for this model, from the file next to this module."""
    requests = json.loads(_ORIGINALS.read_text(encoding="utf-8"))
    return [
        Original(one["method"], one["path"].format(model=model), {"model": model, **body} if body else None)
        for one, body in ((one, one.get("body")) for one in requests)
    ]


def mutated(known: Sequence[Original], rng: random.Random) -> Sent:
    """Return one of these requests with one to three mutations of one way."""
    method, path, body = rng.choice(known)
    changes = range(rng.randint(1, _MOST_CHANGES))
    way = rng.choice([*_WAYS]) if body is not None else "message"
    data = b"" if body is None else json.dumps(body).encode()
    if way == "values":
        changed: Any = copy.deepcopy(body)
        for _ in changes:
            changed = _with_other_value(changed, rng)
        data = _written(changed)
    elif way == "bytes":
        for _ in changes:
            data = _with_other_bytes(data, rng)
    headers = {"host": "localhost", "connection": "close", "content-type": "application/json"}
    if way == "headers":
        for _ in changes:
            headers[rng.choice(_HEADERS)] = rng.choice(_HEADER_VALUES)
        method = rng.choice((method, method, *_METHODS))
        path += rng.choice(_ENDS_OF_PATHS)
    if body is not None:
        headers.setdefault("content-length", str(len(data)))
    head = "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in headers.items())])
    message = head.encode("utf-8", "surrogatepass") + b"\r\n" + data
    if way == "message":
        for _ in changes:
            message = _with_other_bytes(message, rng)
    return Sent(way, message)


_WAYS = ("values", "values", "values", "bytes", "headers", "message")
_METHODS = ("GET", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "post", "POST\t")
_ENDS_OF_PATHS = ("", "", "", "/", "//", "/..", "?stream=true", "?a=%ff", "%00", "%2e%2e/", "/" + "x" * 5000)
_HEADERS = (
    *("content-type", "content-length", "transfer-encoding", "content-encoding", "accept", "host", "expect", "upgrade"),
    *("authorization", "last-event-id", "x-request-id", "x-forwarded-for", "origin", "cookie", "connection"),
)
_HEADER_VALUES = (
    *("", "0", "-1", "5", "1e3", "99999999999999999999", "chunked", "gzip, deflate", "text/plain", "*/*", "Bearer "),
    *("Bearer ÿ", "application/json; charset=utf-16", "multipart/form-data", "100-continue", "websocket", "h2c"),
    *("a,b,,c", "evil.example", "::1", "127.0.0.1, 10.0.0.1", "x" * 9000, "AAAA.1+2:3.end", "\x00", "\x7f", "é"),
)


class _Raw(str):
    """Text that is inserted into the body without quoting."""


_VALUES: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: rng.choice((None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**40)),
    lambda rng: rng.choice((0.5, -0.0, 1e-320, 1e308, -1e308, 3.0000000000000004)),
    lambda rng: _Raw(rng.choice(("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "0x1", "'a'", ""))),
    lambda rng: rng.choice(("", " ", "\x00", "\ud800", "\u202e", "é" * 3, "🐕", "null", "true", "[1]", "{{ 7 * 7 }}")),
    lambda rng: rng.choice(("<|im_start|>", "<|im_end|>", "<|end|>", "user", "tool", "text", "auto", "required")),
    lambda rng: rng.choice('ab \n\\"%') * rng.choice((10, 300, 5000)),
    lambda rng: rng.choice(([], {}, [[]], [{}], [None], {"": None}, {"type": "text"}, {"$ref": "#"}, [0] * 2000)),
    lambda rng: {"type": rng.choice(("object", "array", "x", None)), "properties": {"a": {"$ref": "#"}}},
    lambda rng: _Raw("[" * (depth := rng.choice((50, 1000, 50_000))) + "]" * depth),
    lambda rng: {str(number): number for number in range(rng.choice((3, 400)))},
    lambda rng: {"type": "string", "pattern": rng.choice(("(a+)+$", "[", "(?<=a)b", "\\p{L}{1,999}", "a{0,100000}"))},
)
"""Makers of values that replace others."""


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside `value`."""
    inside: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*path, key)
        yield from _paths(one, (*path, key))


def _with_other_value(body: Any, rng: random.Random) -> Any:
    paths = list(_paths(body))
    if not paths or rng.random() < 0.03:
        return rng.choice(_VALUES)(rng)
    *way, key = rng.choice(paths)
    inside = reduce(getitem, way, body)
    act = rng.choice(("replace", "replace", "replace", "remove", "swap", "add", "repeat"))
    if act == "remove":
        del inside[key]
    elif act == "swap":
        inside[key] = copy.deepcopy(reduce(getitem, rng.choice(paths), body))
    elif act == "add" and isinstance(inside, dict):
        inside[rng.choice(("unknown", "n", "stream", "best_of", "echo", "stop", "seed", "", "\x00"))] = inside[key]
    elif act == "repeat" and isinstance(inside, list):
        inside += [copy.deepcopy(inside[key])] * rng.choice((1, 7, 300))
    else:
        inside[key] = rng.choice(_VALUES)(rng)
    return body


def _written(value: Any) -> bytes:
    """Encode as JSON, with raw text inserted as it is."""
    raw: list[_Raw] = []

    def marked(one: Any) -> Any:
        if isinstance(one, _Raw):
            raw.append(one)
            return f"raw-{len(raw) - 1}-raw"
        if isinstance(one, dict):
            return {name: marked(inner) for name, inner in one.items()}
        return [marked(inner) for inner in one] if isinstance(one, list) else one

    return re.sub(r'"raw-(\d+)-raw"', lambda match: raw[int(match[1])], json.dumps(marked(value))).encode()


def _with_other_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return rng.randbytes(8)
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice((1, 1, 2, 8, 64)))
    act = rng.choice(("flip", "remove", "double", "insert", "cut"))
    if act == "flip":
        return data[:begin] + bytes([data[begin] ^ (1 << rng.randrange(8))]) + data[begin + 1 :]
    if act == "cut":
        return data[:begin]
    middle = {"remove": b"", "double": data[begin:end] * 2, "insert": rng.randbytes(end - begin) + data[begin:end]}[act]
    return data[:begin] + middle + data[end:]


def verdict(data: bytes | None) -> tuple[str, str]:
    """Return the kind of the first response, and what is wrong with any of them; None is a response without an end."""
    if data is None:
        return "hang", "no end within a minute"
    if not data:
        return "closed", ""
    answers = list(_answers(data)) or [("100", b"")]
    wrongs = [_wrong_with(status, body) for status, body in answers]
    return answers[0][0], next(filter(None, wrongs), "")


def _answers(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield status and body of each response: the rest of a mutated request may be another request."""
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = head[9:12].decode(errors="replace") if head.startswith(_VERSION) else "no HTTP"
        length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
        if rest.startswith(_VERSION) or status == "100":  # HEAD has no body
            body, data = b"", rest
        elif length is not None:
            body, data = rest[: int(length[1])], rest[int(length[1]) :]
        else:
            body, _, data = rest.partition(b"\r\n0\r\n\r\n")
        if status != "100":
            yield status, body


def _wrong_with(status: str, body: bytes) -> str:
    if not status.isdigit() or status >= "500":
        return "an error of the server"
    if b'"server_error"' in body:
        return "an error of the server inside the answer"
    if status >= "400" and body and not _is_refusal(body):
        return "a refusal without the error fields"
    return ""


def _is_refusal(body: bytes) -> bool:
    try:
        return set(json.loads(body)["error"]) == _ERROR_FIELDS
    except (ValueError, KeyError, TypeError):
        return False


async def answer_of(host: str, port: int, data: bytes) -> bytes | None:
    """Return everything that the server answers; None if it takes too long."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            try:
                writer.write(data)
                await writer.drain()
                writer.write_eof()
            except OSError:  # closed early; the answer says why
                pass
            try:
                return await reader.read()
            except OSError:
                return b""
    except TimeoutError:
        return None
    finally:
        writer.close()


@dataclass
class _Fuzz:
    """Sends requests and counts the answers."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # by way and kind of answer
    wrong: list[Row] = field(default_factory=list)

    async def run(self, url: str, known: Sequence[Original], *, count: int, clients: int, seed: int) -> None:
        address, numbers = httpx.URL(url), iter(range(count))
        with counted(count, "bad requests") as advance:

            async def ask() -> None:
                for number in numbers:
                    sent = mutated(known, random.Random(f"{seed}-{number}"))
                    kind, wrong = verdict(await answer_of(address.host, address.port or 80, sent.data))
                    self.counts[sent.way, kind] += 1
                    if wrong:
                        shown = sent.data[:_SHOWN_BYTES].decode("latin-1")
                        self.wrong.append({"number": number, "kind": kind, "wrong": wrong, "request": shown})
                    advance(1)

            await asyncio.gather(*(ask() for _ in range(clients)))

    def rows(self) -> list[Row]:
        kinds = sorted({kind for _, kind in self.counts})
        return [{"way": way, **{kind: self.counts[way, kind] for kind in kinds}} for way in dict.fromkeys(_WAYS)]


async def _all_of_it(url: str, model: str, fuzz: _Fuzz, *, count: int, clients: int, seed: int) -> dict[str, object]:
    """Send bad requests between two rounds of good ones; return the summary."""
    good = questions(model, [[{"role": "user", "content": text}] for text in ("Hi", "Count.", "Why?", "A note")], 12)
    async with httpx.AsyncClient() as client:
        before = await answers_alone(client, url, good)
        await fuzz.run(url, originals(model), count=count, clients=clients, seed=seed)
        after = await answers_alone(client, url, good)
        slots = await slots_at_rest(client, url)
    return {
        "requests": count,
        "wrong_answers": len(fuzz.wrong),
        "hangs": sum(row["kind"] == "hang" for row in fuzz.wrong),
        "refused": sum(number for (_, kind), number in fuzz.counts.items() if kind.startswith("4")),
        "answered": sum(number for (_, kind), number in fuzz.counts.items() if kind.startswith("2")),
        "slots_lost": slots,
        "mismatched_tokens": sum(said.differs(expected) for said, expected in zip(after, before, strict=True)),
    }


def run(
    loaded: LoadedConfig,
    count: Annotated[int, typer.Option(min=1, help="Bad requests.")] = 60_000,
    clients: Concurrency = 8,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Send bad requests to a real server. Exit code 1 for a 5xx, a hang, a lost slot, or another token afterwards."""
    refuse_unwritable(out)
    fuzz = _Fuzz()
    with one_server(loaded.config, max_output_tokens=_SHORT_ANSWERS) as server:
        name = loaded.config.public_model_name
        summary = asyncio.run(_all_of_it(server.url, name, fuzz, count=count, clients=clients, seed=seed))
    rows = fuzz.rows()
    columns = [(name, lambda row, name=name: str(row[name])) for name in rows[0]]
    shown = [f"request {one['number']}: {one['kind']}, {one['wrong']}: {one['request']!r}" for one in fuzz.wrong]
    conditions = {**surroundings(), "model": loaded.config.model}
    same = report(conditions, out, [*rows, *fuzz.wrong], summary, table_of(columns, rows), *shown[:_SHOWN])
    print(in_one_line(summary))
    return same and not fuzz.wrong and not summary["slots_lost"]
