"""Every schema can be honoured, and a run compares bound with free answers, plain with speculative ones."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.structured import SCHEMAS
from service.grammars import GrammarCompiler
from service.tokenizer import ChatTokenizer
from tests.tiny_models import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_can_be_honoured(name: str) -> None:
    GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({258})).compile("json_schema", SCHEMAS[name])


def test_a_run_prints_and_writes_every_schema(run_tiny: Callable[..., tuple[dict[str, Any], str]]) -> None:
    report, _ = run_tiny(
        *("structured", "--limit", 2, "--max-tokens", 40, "--schemas", "choice,person", "--kv-cache", "20MiB"),
        *("--budget-policy", "fixed", "--max-budget", 8),
    )
    assert [row["schema"] for row in report["rows"]] == ["choice", "person"]
    assert report["rows"][0]["ended_in_stop"] == 1.0
    assert report["summary"]["mismatched_tokens"] == 0
    assert report["summary"]["speedup_bound"] > 0
