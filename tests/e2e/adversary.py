"""A client that asks for as much as it may, beside eight honest streams. As a program it measures what they lose:
`python -m tests.e2e.adversary --minutes 10 --out FILE`, with `--keyless` for clients known by their addresses."""

import argparse
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPConnection
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil

from service.bench.servers import came_true
from service.conditions import surroundings
from tests.processes import Process, begin, write_settings

KEYS = ["honest", "greedy"]
PLACES = ("Rome", "Bern", "Graz", "Oslo", "Kyiv", "Lima", "Bonn", "Nice")
PROMPTS = [f"{place}: the river, the bridge and the market of" for place in PLACES]
PATIENCE_SECONDS = 300.0  # for one answer, where the adversary waits for each
LARGEST_BODY = 4 * 1024**2
GZIP = b"\x1f\x8b"  # how its bodies begin
MOST_AT_ONCE = 64  # ordinary requests; twice the sequences that a server runs by default
_SAMPLE_SECONDS = 0.2
_numbers = count()  # make each body another one


class Reply(NamedTuple):
    status: int
    lines: list[tuple[float, bytes]]  # and when each came


@dataclass(frozen=True)
class Caller:
    """A client of a server, known by a key or by its address."""

    server: Process
    model: str
    key: str = ""
    address: str = "127.0.0.1"

    def ask(self, path: str, body: dict[str, Any] | bytes, *, until: float | None = None) -> Reply:
        """Send a body, and read the answer. Raises TimeoutError where it takes until `until`."""
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        headers |= {"content-encoding": "gzip"} if data.startswith(GZIP) else {}
        seconds = PATIENCE_SECONDS if until is None else max(0.01, until - time.monotonic())
        where = self.server.url.removeprefix("http://")
        with closing(HTTPConnection(where, timeout=seconds, source_address=(self.address, 0))) as connection:
            connection.request("POST", path, data, headers)
            reply = connection.getresponse()
            return Reply(reply.status, [(time.monotonic(), line) for line in reply])


class Heard(NamedTuple):
    """An answer to an honest stream."""

    text: str
    began: float
    arrivals: list[tuple[float, int]]  # when tokens came, and how many


def heard(caller: Caller, prompt: str, tokens: int) -> Heard:
    """The answer at temperature 0. Raises AssertionError where there is none."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "return_token_ids": True}
    began = time.monotonic()
    reply = caller.ask("/v1/completions", body)
    assert reply.status == 200, (reply.status, reply.lines[:9])
    events = [(at, json.loads(line[6:])) for at, line in reply.lines if line.startswith(b"data: {")]
    choices = [(at, choice) for at, event in events for choice in event.get("choices", [{"finish_reason": event}])]
    assert choices[-1][1]["finish_reason"] in ("length", "stop"), choices[-1]
    arrivals = [(at, len(choice["token_ids"])) for at, choice in choices if choice.get("token_ids")]
    return Heard("".join(choice["text"] for _, choice in choices), began, arrivals)


class Sizes(NamedTuple):
    """What a model's context limits."""

    tokens: int  # of an answer
    functions: int
    shared: int  # tokens at the beginning of many prompts
    turn: int  # characters of a turn, all the same


LARGEST = Sizes(tokens=64, functions=128, shared=8000, turn=65_536)  # of 8,192 tokens
SMALL = Sizes(tokens=1, functions=8, shared=512, turn=64)


@dataclass(frozen=True)
class Adversary:
    """Bodies of each kind."""

    ask: Callable[..., Reply]
    model: str
    sizes: Sizes

    def ordinary(self) -> None:
        self._complete(f"{next(_numbers)}. The longest rivers of the world are")

    def many_sequences(self) -> None:
        self._complete(["a"] * 256, n=8, presence_penalty=0.1)

    def many_matched_sequences(self) -> None:
        self._complete(
            ["a"] * 256, n=8, frequency_penalty=0.1, guided_regex=f"[ab]{{{next(_numbers) + self.sizes.tokens}}}"
        )

    def prediction(self) -> None:
        content = f"{next(_numbers)} " + "river bank " * (LARGEST_BODY // 11 - 99)
        self._complete("a", n=8, prediction={"type": "content", "content": content})

    def functions(self) -> None:
        names = (f"f{next(_numbers)}" for _ in range(self.sizes.functions))
        tools = [{"type": "function", "function": {"name": name, "parameters": _unenforceable(name)}} for name in names]
        message = {"role": "user", "content": "a"}
        self.ask("/v1/chat/completions", {"messages": [message], "tools": tools, "max_tokens": self.sizes.tokens})

    def deep_json(self) -> None:
        rules = ["start: r0", *(f"r{n}: r{n + 1}" for n in range(3000)), 'r3000: "a"']
        self._complete("a", guided_grammar="\n".join(rules))
        for depth in (100, 900, 100_000):  # of what is read, of what Python reads, and of what nothing does
            deep, schema = "[" * depth + "]" * depth, '{"items":' * depth + "{}" + "}" * depth
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": deep}}
            spoken = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
            past = {"type": "function_call", "call_id": "a", "name": "f", "arguments": deep}
            self.ask("/v1/chat/completions", {"messages": spoken, "max_tokens": self.sizes.tokens})
            self.ask("/v1/responses", {"input": [past], "max_output_tokens": self.sizes.tokens})
            for name, value in (("guided_json", schema), ("json_schema", deep), ("guided_regex", deep)):
                self._complete("a", **{name: value})
            for named in (f'"metadata": {deep}', f'"prompt": {deep}', f'"prompt": "a", "guided_json": {schema}'):
                self.ask("/v1/completions", f'{{"model": "{self.model}", "max_tokens": 2, {named}}}'.encode())

    def questions_apart(self) -> None:
        self._complete(f"{self._shared()} {next(_numbers)}")

    def questions_at_once(self) -> None:
        self._complete([f"{self._shared()} {next(_numbers)}" for _ in range(256)])

    def conversation(self) -> None:
        """As many turns of 64 KiB as the context has room for, by the longest tokens that there are."""
        previous: dict[str, str] = {}
        for _ in range(16):
            text = {"role": "user", "content": "#" * self.sizes.turn}
            noted = {"metadata": {"a": "a" * 65_536}, "max_output_tokens": self.sizes.tokens}
            reply = self.ask("/v1/responses", {"input": [text], "store": True, **noted, **previous})
            if reply.status != 200:
                return
            previous = {"previous_response_id": json.loads(reply.lines[0][1])["id"]}

    def packed(self) -> None:
        body = {"model": self.model, "prompt": "a " * (LARGEST_BODY // 2 - 99), "max_tokens": self.sizes.tokens}
        for data in (json.dumps(body).encode(), bytes(4 * LARGEST_BODY)):
            self.ask("/v1/completions", gzip.compress(data))
        self.ask("/v1/completions", gzip.compress(b"") * (LARGEST_BODY // 20))

    def _complete(self, prompt: str | list[str], **more: object) -> None:
        self.ask("/v1/completions", {"prompt": prompt, "max_tokens": self.sizes.tokens, **more})

    def _shared(self) -> str:
        return "a" + " b" * (self.sizes.shared - 1)


KINDS: dict[Callable[[Adversary], None], tuple[int, int]] = {
    Adversary.many_sequences: (4, 2048),
    Adversary.many_matched_sequences: (4, 2048),
    Adversary.prediction: (4, 8),
    Adversary.functions: (4, 1),
    Adversary.deep_json: (4, 1),
    Adversary.packed: (4, 1),
    Adversary.questions_apart: (256, 1),
    Adversary.questions_at_once: (1, 256),
    Adversary.conversation: (8, 1),
}
"""Requests of the adversary at the same time, and sequences of each."""


def _unenforceable(name: str) -> dict[str, Any]:
    """A schema each of whose patterns is found out by many compilations."""
    return {"properties": {place: {"pattern": f"(?={name})"} for place in "ab"}}


@dataclass
class Phase:
    """What became of the clients while they were together."""

    seconds: float = 0.0
    streams: list[Heard] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)  # of the other client's requests
    left: int = 0  # of its requests at the end of the phase, unanswered
    failures: list[str] = field(default_factory=list)  # of the honest ones, and answers that are our fault
    peak_mib: float = 0.0  # resident
    idle_after: float = 0.0  # seconds from the end of the phase until the server has nothing to do

    def figures(self) -> dict[str, Any]:
        """Tokens per second of all honest streams, seconds to their first tokens and between their steps, and more."""
        times = [[at for at, _ in stream.arrivals] for stream in self.streams]
        end = min(stream.began for stream in self.streams) + self.seconds
        tokens = sum(number for stream in self.streams for at, number in stream.arrivals if at <= end)
        gaps = [after - before for arrived in times for before, after in pairwise(arrived)]
        first = [arrived[0] - stream.began for arrived, stream in zip(times, self.streams, strict=True)]
        shares = {"p50": 50, "p95": 95, "p99": 99}
        return {
            "tokens_per_second": tokens / self.seconds,
            "first_token_seconds": {name: float(np.percentile(first, share)) for name, share in shares.items()},
            "gap_seconds": {name: float(np.percentile(gaps, share)) for name, share in shares.items()},
            **{name: value for name, value in vars(self).items() if name != "streams"},
        }


@dataclass(frozen=True)
class Crowd:
    """Eight honest streams, and the other client beside them."""

    honest: Caller
    greedy: Caller
    sizes: Sizes
    tokens: int = 64  # of an honest answer

    @cached_property
    def alone(self) -> dict[str, str]:
        """The honest answers by prompt, while no one else asks."""
        return {prompt: heard(self.honest, prompt, self.tokens).text for prompt in PROMPTS}

    @property
    def resident_mib(self) -> float:
        """Of the server."""
        return float(psutil.Process(self.honest.server.running.pid).memory_info().rss / 2**20)

    def together(self, kind: Callable[[Adversary], None], at_once: int, seconds: float | None = None) -> Phase:
        """Honest streams beside so many requests of a kind: for a time, or until each of these was answered once."""
        phase, began = Phase(), time.monotonic()
        until = None if seconds is None else began + seconds

        def ask(*body: Any, **how: Any) -> Reply:
            reply = self.greedy.ask(*body, until=until, **how)
            phase.statuses[reply.status] += 1
            return reply

        adversary = Adversary(ask, self.greedy.model, self.sizes)

        def send() -> None:
            try:
                kind(adversary)
                while until is not None and time.monotonic() < until:
                    kind(adversary)
            except TimeoutError:
                assert until is not None, "a request hangs"
                phase.left += 1

        with ThreadPoolExecutor(len(PROMPTS) + at_once) as pool:
            sending = [pool.submit(send) for _ in range(at_once)]

            def listen(prompt: str) -> None:
                while True:
                    try:
                        phase.streams.append(answer := heard(self.honest, prompt, self.tokens))
                        if answer.text != self.alone[prompt]:
                            phase.failures.append(f"{prompt}: {answer.text} instead of {self.alone[prompt]}")
                    except (AssertionError, OSError) as error:
                        phase.failures.append(repr(error))
                        time.sleep(1.0)
                    if all(sent.done() for sent in sending):
                        return

            everyone = [*sending, *(pool.submit(listen, prompt) for prompt in PROMPTS)]
            while wait(sending, _SAMPLE_SECONDS).not_done:
                phase.peak_mib = max(phase.peak_mib, self.resident_mib)
            phase.seconds = time.monotonic() - began
        for ended in everyone:
            ended.result()
        phase.failures += [f"status {status}" for status in phase.statuses if not 200 <= status < 500]
        assert came_true(self._is_idle), "requests are still open though their clients have left"
        phase.idle_after = time.monotonic() - began - phase.seconds
        return phase

    def _is_idle(self) -> bool:
        page = self.honest.server.ask("GET", "/metrics").text
        return "\nadaptree_requests_in_flight 0.0\n" in page and "\nadaptree_num_requests_waiting 0.0\n" in page


def settings_of(*, keyed: bool) -> dict[str, object]:
    """Of a server whose two clients are known by keys, or by address."""
    return {"api_keys": KEYS} if keyed else {}


def crowd_of(server: Process, model: str, *, keyed: bool, sizes: Sizes, tokens: int = 64) -> Crowd:
    """The clients of such a server."""
    keys = KEYS if keyed else ["", ""]
    honest, greedy = (Caller(server, model, key, f"127.0.0.{end}") for end, key in enumerate(keys, 1))
    return Crowd(honest, greedy, sizes, tokens)


def measured(crowd: Crowd, minutes: float) -> dict[str, Any]:
    """Each kind in turn, and before it as many ordinary requests of the same client. # -> figures by kind"""
    assert crowd.alone
    seconds = minutes * 60 / (2 * len(KINDS))
    crowd.together(Adversary.ordinary, MOST_AT_ONCE, seconds)  # what a server sets aside at its first requests
    before, report = crowd.resident_mib, dict[str, Any]()
    for kind, (at_once, sequences) in KINDS.items():
        ordinary = crowd.together(Adversary.ordinary, min(MOST_AT_ONCE, at_once * sequences), seconds).figures()
        beside = crowd.together(kind, at_once, seconds).figures()
        share = beside["tokens_per_second"] / ordinary["tokens_per_second"]
        report[kind.__name__] = {"share": share, "ordinary": ordinary, "adversary": beside}
        print(kind.__name__, json.dumps(report[kind.__name__]), flush=True)
    peak = max(one["adversary"]["peak_mib"] for one in report.values())
    return {"kinds": report, "grown_mib": {"peak": peak - before, "after": crowd.resident_mib - before}}


def main() -> None:
    """Measure a server of the embedded model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--keyless", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        report = measure_embedded(Path(folder), options.minutes, keyed=not options.keyless)
    options.out.write_text(json.dumps({"conditions": surroundings(), **report}, indent=2) + "\n")


def measure_embedded(folder: Path, minutes: float, *, keyed: bool) -> dict[str, Any]:
    """Start a server of the embedded model, and measure it."""
    config = folder / "config.yaml"
    write_settings(config, {"port": 0, "state_dir": str(folder), **settings_of(keyed=keyed)})
    server = begin(["serve"], config, folder / "log")
    try:
        return measured(crowd_of(server, "smollm2-135m", keyed=keyed, sizes=LARGEST), minutes)
    finally:
        server.end()


if __name__ == "__main__":
    main()
