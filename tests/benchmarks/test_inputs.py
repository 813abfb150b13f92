"""Bad requests against a real server: as bad as they claim, none of them unjudged, and the server outlives them."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checkpoint import write_dummy
from benchmarks.inputs import mutated, originals, verdict

REFUSAL = b'{"error": {"message": "", "type": "", "param": null, "code": null}}'


def answer(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status} Word\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("reported", "kind", "is_wrong"),
    [
        (answer("200", b"{}"), "200", False),
        (answer("400", REFUSAL), "400", False),
        (answer("400", b'{"detail": "no"}'), "400", True),
        (answer("404", b""), "404", False),
        (answer("500", REFUSAL), "500", True),
        (answer("503", REFUSAL), "503", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + answer("200", b"{}"), "200", False),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b'8\r\n{"type": "server_error"}\r\n0\r\n\r\n', "200", True),
        (answer("200", b"{}") + answer("500", REFUSAL), "200", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + answer("400", REFUSAL), "200", False),  # of HEAD
        (b"nonsense", "no HTTP", True),
        (b"", "closed", False),
        (None, "hang", True),
    ],
)
def test_an_answer_is_judged(reported: bytes | None, kind: str, is_wrong: bool) -> None:
    found, wrong = verdict(reported)
    assert (found, bool(wrong)) == (kind, is_wrong)


def test_a_request_is_a_function_of_its_number_and_most_are_mutated() -> None:
    known = originals("tiny")
    good = {json.dumps(one.body).encode() for one in known}
    sent = [mutated(known, random.Random(str(number))) for number in range(300)]
    assert sent[:20] == [mutated(known, random.Random(str(number))) for number in range(20)]
    ways = Counter(one.way for one in sent)
    assert set(ways) == {"values", "bytes", "headers", "message"}
    bodies = [one.data.partition(b"\r\n\r\n")[2] for one in sent if one.way in ("values", "bytes")]
    assert sum(body in good for body in bodies) < len(bodies) / 10


@pytest.mark.slow
def test_a_server_outlives_them(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    out, tiny = tmp_path / "out.json", write_dummy("tiny", tmp_path / "tiny")
    code, output = run(
        *("inputs", "--model", tiny, "--count", 200, "--out", out, "--state-dir", tmp_path / "state"),
        *("--device", "cpu", "--threads", 1, "--drafter", "memory", "--budget-policy", "fixed", "--max-budget", 8),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    summary = report["summary"]
    assert (summary["wrong_answers"], summary["slots_lost"], summary["mismatched_tokens"]) == (0, 0, 0)
    assert sum(number for row in report["rows"] for kind, number in row.items() if kind != "way") == 200
    assert summary["refused"] > 100
    assert "hangs 0" in output.splitlines()[-1]
