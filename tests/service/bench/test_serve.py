"""What a client gets over HTTP: how answers are read, which servers there are, and the command against real ones."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from service.bench.driver import Answer, Run
from service.bench.experiment import figures_of
from service.bench.serve import bodies_of, configurations, ratios_of
from service.bench.servers import UNKNOWN, HttpClient, answer_of
from service.config import ServiceConfig
from service.errors import StartupError
from tests.processes import Process, begin, write_settings
from tests.service.bench.parts import run_command, save_two_layers
from tests.tiny_models import served_by

USAGE = {"prompt_tokens": 7, "completion_tokens": 4}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, token_ids: list[int] | None = None) -> bytes:
    ids = {} if token_ids is None else {"token_ids": token_ids}
    return event(choices=[{"index": 0, "delta": {"content": text}, **ids}], usage=None)


# Reading answers.


def test_a_stream_is_read_by_the_times_of_its_chunks() -> None:
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    record = {"speculative_decoding": {"acceptance_histogram": [1, 0, 1]}}
    last = event(choices=[], usage=USAGE, metrics=record) + b"data: [DONE]\n\n"
    halves = chunk("b\u2028", [5, 6])  # a separator of lines elsewhere
    parts = [
        (1.0, role + chunk("a", [4])),
        (1.5, halves[:30]),
        (2.0, halves[30:] + b": ping\n\n"),
        (4.0, chunk("", [7])),
    ]
    assert answer_of("it", [*parts, (4.0, last)]) == Answer(
        (4, 5, 6, 7), "ab\u2028", None, (0, 2), first_token_seconds=1.0, gaps_seconds=(1.0, 2.0), prompt_tokens=7
    )


def test_tokens_without_ids_are_counted_by_the_server() -> None:
    parts = [(1.0, chunk("a")), (3.0, chunk("bcd") + event(choices=[], usage=USAGE))]
    answer = answer_of("it", parts)
    assert answer.token_ids == (UNKNOWN,) * 4
    assert Run((answer,), (), 4.0).decoded == (3, 2.0)


@pytest.mark.parametrize("choice", [{"message": {"content": "abcd"}}, {"text": "abcd"}])
def test_a_whole_answer_is_one_chunk(choice: dict[str, object]) -> None:
    body = json.dumps({"choices": [{**choice, "token_ids": [1, 2, 3, 4]}], "usage": USAGE}).encode()
    answer = answer_of("it", [(2.0, body[:20]), (2.5, body[20:])])
    assert (answer.token_ids, answer.seconds, answer.gaps_seconds) == ((1, 2, 3, 4), 2.5, ())
    assert Run((answer,), (), 4.0).decoded == (0, 0.0)


def test_an_error_in_a_stream_names_the_server() -> None:
    with pytest.raises(StartupError, match=r"^it sent no text.*engine_error"):
        answer_of("it", [(1.0, chunk("a", [1])), (2.0, event(error={"code": "engine_error"}))])


# Figures.


def test_figures_have_the_meaning_of_vllms() -> None:
    first = Answer((1, 2, 3), first_token_seconds=1.0, gaps_seconds=(0.5, 1.5), prompt_tokens=10)
    second = Answer((1, 2, 3), first_token_seconds=3.0, gaps_seconds=(1.0,), first_tokens=2, prompt_tokens=20)
    runs = [Run((first,), (), 4.0), Run((second,), (), 6.0)]
    figures = figures_of(runs)
    assert (figures["duration"], figures["completed"], figures["total_input_tokens"]) == (10.0, 2, 30)
    assert (figures["request_throughput"], figures["output_throughput"]) == (0.2, 0.6)
    assert figures["total_token_throughput"] == 3.6
    assert [figures[f"mean_{name}_ms"] for name in ("ttft", "tpot", "itl", "e2el")] == [2000, 750, 1000, 3500]
    assert figures["p99_itl_ms"] == pytest.approx(1490)
    assert figures["tau"] is None
    assert ratios_of(runs, {"plain": runs}) == {"decode_throughput": 1.0}
    slower = [Run(run.answers, (), 2 * run.seconds) for run in runs]
    ratios = ratios_of(slower, {"plain": runs, "slower": slower})
    assert (ratios["over_plain"], ratios["decode_over_plain"]) == ((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))


def test_whole_answers_have_no_gaps_to_report() -> None:
    runs = [Run((Answer((1, 2), first_token_seconds=1.0, first_tokens=2),), (), 1.0)]
    assert "mean_ttft_ms" in figures_of(runs)
    assert not {"mean_itl_ms", "mean_tpot_ms"} & figures_of(runs).keys()
    assert ratios_of(runs, {"plain": runs}) == {}


# Servers and requests.


def test_servers_go_by_name() -> None:
    assert configurations("plain,adaptive,a:drafter=memory+specblock/memory=off/memory_file=x/y", {}) == {
        "plain": {"drafter": "none"},
        "adaptive": {},
        "a": {"drafter": "memory+specblock", "memory": "off", "memory_file": "x/y"},
    }
    for names, others in (("plain,plain", {}), ("plain", {"plain": "URL"}), ("plain,,a", {})):
        with pytest.raises(StartupError, match="name each server once"):
            configurations(names, others)


def test_requests_are_numbered(prompt_file: Path, tmp_path: Path) -> None:
    bodies = bodies_of(prompt_file, 2, {"seed": 5, "max_tokens": 3})
    assert [body["seed"] for body in bodies] == [5, 6]
    assert bodies[1]["messages"] == [{"role": "user", "content": "in the hat"}]
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(StartupError, match="holds no prompt"):
        bodies_of(tmp_path / "none.jsonl", None, {"seed": 0})


# The command.


class Stub(BaseHTTPRequestHandler):
    """Another server: it sends no token ids, and refuses what is too long."""

    protocol_version = "HTTP/1.1"
    keys: list[str | None] = []  # noqa: RUF012  # of all requests

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send(200, b'{"data": [{"id": "other"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.keys.append(self.headers["authorization"])
        if body["max_tokens"] > 100:
            return self._send(400, b'{"error": "too long"}')
        return self._send(200, chunk("a") + chunk("b") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n")

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def other() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.fixture
def bench(tmp_path: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch, quiet: None) -> Callable[..., Any]:
    """`adaptree bench serve` of a tiny model: its exit code and its report. Servers are forked, which is quicker."""
    model, out, numbers = save_two_layers(tmp_path / "model"), tmp_path / "out.json", count()

    @contextmanager
    def forked(config: ServiceConfig, **changes: object) -> Iterator[Process]:
        file = tmp_path / f"server-{next(numbers)}.yaml"
        settings = served_by(model, budget_policy="fixed", max_model_len=256, state_dir=str(tmp_path / "state"))
        server = begin(["serve"], file, file.with_suffix(".log"), numbers=write_settings(file, {**settings, **changes}))
        yield server
        server.end()

    def bench(*words: object) -> tuple[int, dict[str, Any], str]:
        code, output = run_command("bench", "serve", "--prompts", prompt_file, "--max-tokens", 12, "--out", out, *words)
        return code, json.loads(out.read_text()), output

    monkeypatch.setattr("service.bench.serve.one_server", forked)
    return bench


def geometric_mean_of(rows: Sequence[dict[str, Any]]) -> float:
    return geometric_mean([row["over_plain"][0] for row in rows if "over_plain" in row])


def test_our_servers_answer_with_the_same_tokens(bench: Callable[..., Any]) -> None:
    code, report, output = bench("--concurrency", "1,2", "--temperature", 0.8)
    assert code == 0, output
    rows = report["rows"]
    assert [(row["server"], row["clients"], row["turns"]) for row in rows] == [
        *(("plain", 1, 3), ("adaptive", 1, 3)),
        *(("plain", 2, 1), ("adaptive", 2, 1)),
    ]
    assert all((row["completed"], row["total_output_tokens"]) == (3, 36) for row in rows)
    assert all(row["context_switches_per_token"] > 0 and row["p99_itl_ms"] > 0 for row in rows)
    assert rows[0]["tau"] == 1.0 < rows[1]["tau"]
    assert len(rows[1]["over_plain"]) == len(rows[1]["decode_over_plain"]) == 3
    assert "decode_over_plain" not in rows[3]
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["mean_over_plain"] == {"adaptive": pytest.approx(geometric_mean_of(rows))}
    assert "decode over plain" in output


def test_another_text_fails_and_others_are_not_compared(
    bench: Callable[..., Any], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--servers", "adaptive,again:max_budget=2", "--against", f"it={other}", "--api-key", "s3")
    code, report, _ = bench(*words)
    assert code == 0
    assert [(row["server"], row["total_output_tokens"], row["mismatched_tokens"]) for row in report["rows"]] == [
        *(("adaptive", 36, 0), ("again", 36, 0), ("it", 12, None)),
    ]
    assert set(Stub.keys) == {"Bearer s3"}
    assert "s3" not in report["conditions"]["command"].split()
    monkeypatch.setattr("service.bench.serve.mismatches", lambda expected, got: 1)
    assert bench("--servers", "plain", "--no-stream")[0] == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [(None, r"^it answers 400: .*too long"), ("http://127.0.0.1:9", "^it does not answer: ConnectionRefused")],
)
def test_a_server_that_does_not_answer_is_named(other: str, url: str | None, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        HttpClient("it", url or other, stream=True).send([{"prompt": "a", "max_tokens": 101}], 1)
