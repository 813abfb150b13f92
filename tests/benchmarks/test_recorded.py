"""The memory beside SuffixDecoding: steps are counted alike, means are met, and a run says what it compared."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.recorded import Ours, accepted, matched, played, row_of
from drafters.tree import ROOT
from service.errors import StartupError
from service.training.regenerate import Response


def response(task: str, *tokens: int) -> Response:
    return Response(id="a-1", task=task, temperature=0, prompt=[1, 2, 3], response=[*tokens])


def test_a_path_that_stands_in_the_answer_is_accepted() -> None:
    nodes = [(5, ROOT), (6, ROOT), (7, 1), (8, 0)]
    assert [accepted(nodes, follows) for follows in ([6, 7, 9], [5, 7], [7], [])] == [2, 1, 0, 0]


def test_past_answers_save_steps_and_nothing_is_counted_twice() -> None:
    text = response("t", *range(20, 60))
    tokens, steps, nodes = played(Ours(0.1, 1 << 20), [text, text])
    assert tokens.tolist() == [40, 40]
    assert steps[1] < steps[0] == 40
    assert nodes[0] == 0 < nodes[1]


def test_a_mean_is_met_with_the_fewest_steps() -> None:
    few, many, worse = (np.array([[9.0], [steps], [nodes]]) for steps, nodes in ((6, 12), (3, 24), (5, 40)))
    best = matched([few, worse, many], 4.0)
    assert best[2].sum() / best[1].sum() == pytest.approx(4)
    assert best[1].sum() == pytest.approx(4.5)
    assert matched([few], 9.0) is few
    with pytest.raises(StartupError, match="--nodes 1"):
        matched([few, many], 1.0)
    row = row_of("t", 4.0, many, few)
    assert (row["ratio"][0], row["accepted_ratio"][0]) == (2.0, 4.0)


class Counting:
    """A cache that proposes one token, the next number."""

    def __init__(self, depth: int) -> None:
        self.start_request = self.stop_request = self.add_active_response = lambda *args: None
        self.speculate = lambda number, text, **how: SimpleNamespace(token_ids=[text[-1] + 1], parents=[ROOT])


def test_a_run_compares_both(
    run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "responses.jsonl", tmp_path / "out.json"
    lines = [response(task, *range(20, 40)) for task in ("qa", "qa", "code", "code")]
    file.write_text("\n".join(line.model_dump_json() for line in lines))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(StartupError, match="pip install arctic-inference"):
        run("recorded", "--responses", file)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", SimpleNamespace(SuffixDecodingCache=Counting))
    monkeypatch.setattr("benchmarks.recorded.version", lambda name: "1")
    code, output = run("recorded", "--responses", file, "--nodes", "8", "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert (code, [row["kind"] for row in rows]) == (0, ["qa", "code"])
    assert [(row["nodes"][1], row["tokens_per_step"][1]) for row in rows] == [(1, 20 / 11)] * 2
    assert "ratio, 8 nodes" in output
