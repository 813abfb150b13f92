"""`python -m benchmarks schema-suite`: how many schemas of the public JSON schema suite compile, and whether answers
validate."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from jsonschema import Draft202012Validator

from service.assembly import Assembly
from service.bench.commands import AnswerTokens, Out, Seed
from service.bench.driver import ClosedLoop, Run, generate
from service.bench.experiment import (
    Column,
    Measure,
    Row,
    conclude,
    counted,
    mismatches,
    plain_engine,
    prepare,
    request_of,
    table_of,
)
from service.config import LoadedConfig
from service.text.grammars import Grammar, GrammarError

_TEMPERATURES = (0.0, 1.0)
_TOGETHER = 8  # requests


class Case(NamedTuple):
    """A schema of the suite, with values that validate or not."""

    description: str
    schema: Any
    tests: Sequence[dict[str, Any]]


class Honoured(NamedTuple):
    """A schema that compiles, with its grammar."""

    case: Case
    grammar: Grammar


def read_suite(folder: Path) -> list[Case]:
    """Read the suite's folder of one draft: a list of cases per file."""
    return [
        Case(f"{path.stem}: {case['description']}", case["schema"], case["tests"])
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]


def run(
    loaded: LoadedConfig,
    suite: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Folder of the suite: a file per keyword.")],
    answers: Annotated[int, typer.Option(min=1, help="Answers per temperature.")] = 500,
    max_tokens: AnswerTokens = 100,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Answer the suite's schemas, plain and speculative, at temperatures 0 and 1, and validate the answers."""
    assembly = prepare(loaded.config, out)
    cases = read_suite(suite)
    honoured, refused = compiled(assembly, cases)
    chosen = list(islice(cycle(honoured), answers))
    rows = []
    with counted(len(_TEMPERATURES) * 2, "runs") as advance:
        for temperature in _TEMPERATURES:
            measure = Measure(temperature=temperature, max_tokens=max_tokens, concurrency=_TOGETHER, seed=seed)
            rows.append(row_of(assembly, chosen, measure, advance))
    summary = {
        "schemas": len(cases),
        "honoured": len(honoured) / len(cases),
        "refused": dict(refused.most_common()),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
        "invalid": [text for row in rows for text in row["invalid"]],
    }
    lines = [f"{key}: {value}" for key, value in summary.items() if key != "refused"]
    return (
        conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, caption=""), *lines) and not summary["invalid"]
    )


def compiled(assembly: Assembly, cases: Sequence[Case]) -> tuple[list[Honoured], Counter[str]]:
    """Compile the schemas; count the reasons of those that are refused."""
    honoured, refused = [], Counter[str]()
    for case in cases:
        if not isinstance(case.schema, dict):
            refused["a schema must be an object"] += 1
            continue
        try:
            honoured.append(Honoured(case, assembly.grammars.compile("json_schema", case.schema)))
        except GrammarError as error:
            refused[str(error).partition(":")[0].partition("'")[0].strip()] += 1
    return honoured, refused


def row_of(assembly: Assembly, chosen: Sequence[Honoured], measure: Measure, advance: Any) -> Row:
    """Return the figures of one temperature."""
    prompts = [_prompt_of(assembly, one.case.schema) for one in chosen]
    requests = [
        replace(request_of(number, prompt, measure, ignore_eos=False), grammar=one.grammar)
        for number, (prompt, one) in enumerate(zip(prompts, chosen, strict=True))
    ]
    limits = replace(assembly.limits, max_sequences=_TOGETHER)
    runs: list[Run] = []
    for engine in (plain_engine(assembly, limits), assembly.engine(limits=limits)):
        runs.append(generate(engine, requests, ClosedLoop(_TOGETHER)))
        advance(1)
    ended = [
        (one, answer.text)
        for one, answer in zip(chosen, runs[1].answers, strict=True)
        if answer.finish_reason == "stop"
    ]
    return {
        "temperature": measure.temperature,
        "answers": len(chosen),
        "ended_in_stop": len(ended) / len(chosen),
        "invalid": [f"{one.case.description}: {text}" for one, text in ended if not is_valid(one.case.schema, text)],
        "mismatched_tokens": mismatches(runs[:1], runs[1:]),
    }


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Whether a text is JSON that validates."""
    try:
        return bool(Draft202012Validator(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


def _prompt_of(assembly: Assembly, schema: dict[str, Any]) -> list[int]:
    asked = f"Write JSON for this schema:\n\n{json.dumps(schema)}"
    return assembly.tokenizer.render_chat([{"role": "user", "content": asked}])


_COLUMNS: tuple[Column, ...] = (
    ("temperature", lambda row: str(row["temperature"])),
    ("answers", lambda row: str(row["answers"])),
    ("stop", lambda row: f"{100 * row['ended_in_stop']:.0f} %"),
    ("invalid", lambda row: str(len(row["invalid"]))),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
