"""Every schema can be honoured, and a run compares bound with free answers, plain with speculative ones."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.structured import SCHEMAS
from service.grammars import GrammarCompiler
from service.tokenizer import ChatTokenizer
from tests.service.bench.parts import save_two_layers, written_prompts
from tests.tiny_models import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_can_be_honoured(name: str) -> None:
    GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({258})).compile("json_schema", SCHEMAS[name])


def test_a_run_prints_and_writes_every_schema(run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(written_prompts()))
    threads = torch.get_num_threads()
    try:
        code, output = run(
            *("structured", "--prompts", prompts, "--limit", 2, "--max-tokens", 40, "--schemas", "choice,person"),
            *("--out", out, "--model", folder, "--load-dtype", "float32", "--device", "cpu", "--threads", 1),
            *("--max-model-len", 256, "--kv-cache", "20MiB", "--state-dir", folder / "state", "--drafter", "lookup"),
            *("--budget-policy", "fixed", "--max-budget", 8),
        )
    finally:
        torch.set_num_threads(threads)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [row["schema"] for row in report["rows"]] == ["choice", "person"]
    assert report["rows"][0]["ended_in_stop"] == 1.0
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["speedup_bound"] > 0
