"""What a grammar costs a step, and what drafting gains by it: the same prompts with a schema and without, plain and
speculative, for schemas from tiny to large."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any

import typer
from pydantic import JsonValue

from benchmarks.options import PromptFile
from service.bench.commands import AnswerTokens, Limit, Out, Seed, Temperature
from service.bench.driver import Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    decode_tokens_per_second,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    request_of,
    rotated,
    table_of,
)
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.grammars import Grammar

SPECULATIVE = "speculative"
_TEXT: JsonValue = {"type": "string", "maxLength": 80}
_MANY_NODES = 24  # of a step with many nodes


def _object(**properties: JsonValue) -> dict[str, JsonValue]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: Mapping[str, dict[str, JsonValue]] = {
    "choice": {"enum": ["yes", "no", "I do not know"]},
    "answer": _object(answer=_TEXT),
    "person": _object(name=_TEXT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "list": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 3, "maxItems": 6},
    "review": _object(
        title=_TEXT,
        sentiment={"enum": ["positive", "negative", "neutral"]},
        score={"type": "integer", "minimum": 1, "maximum": 10},
        is_recommended={"type": "boolean"},
        reasons={"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 3},
    ),
    "order": _object(
        customer=_object(first_name=_TEXT, last_name=_TEXT, email={"type": "string", "format": "email"}),
        items={
            "type": "array",
            "items": _object(product=_TEXT, quantity={"type": "integer", "minimum": 1, "maximum": 99}),
            "minItems": 2,
            "maxItems": 3,
        },
        shipping_method={"enum": ["standard", "express", "overnight"]},
    ),
    "tree": {
        "$defs": {
            "node": _object(label=_TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
        },
        "$ref": "#/$defs/node",
    },
    "large": _object(
        **{
            f"section_{number}": _object(
                heading=_TEXT,
                kind={"enum": ["introduction", "argument", "example", "conclusion"]},
                length_in_words={"type": "integer", "minimum": 10, "maximum": 500},
                has_references={"type": "boolean"},
            )
            for number in range(1, 25)
        }
    ),
}


def row_of(schema: str, free: Mapping[str, Sequence[Run]], bound: Mapping[str, Sequence[Run]]) -> Row:
    """Speeds of steps that read no prompt, and what a grammar and drafting make of them."""
    speeds = {("free", name): decode_tokens_per_second(runs) for name, runs in free.items()}
    speeds |= {("bound", name): decode_tokens_per_second(runs) for name, runs in bound.items()}
    speedup = {kind: speeds[kind, SPECULATIVE] / speeds[kind, PLAIN] for kind in ("free", "bound")}
    ends = [answer.finish_reason for run in bound[PLAIN] for answer in run.answers]
    many = {kind: _seconds_of_many(runs[SPECULATIVE]) for kind, runs in (("free", free), ("bound", bound))}
    return {
        "schema": schema,
        "tokens": sum(run.num_tokens for run in bound[PLAIN]),
        "tokens_per_second": {f"{kind} {name}": speed for (kind, name), speed in speeds.items()},
        "speedup_free": speedup["free"],
        "speedup_bound": speedup["bound"],
        "bound_over_free_plain": speeds["bound", PLAIN] / speeds["free", PLAIN],
        "seconds_with_many_nodes": many,
        "ended_in_stop": sum(end == "stop" for end in ends) / len(ends),
        "mismatched_tokens": mismatches(bound[PLAIN], bound[SPECULATIVE]) + mismatches(free[PLAIN], free[SPECULATIVE]),
    }


def _seconds_of_many(runs: Sequence[Run]) -> float | None:
    """Of steps with many nodes that read no prompt."""
    steps = [step for run in runs for step in run.steps if step.stats.drafted_nodes >= _MANY_NODES]
    seconds = [step.seconds for step in steps if not step.stats.prompt_tokens]
    return fmean(seconds) if seconds else None


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    return {
        "speedup_free": fmean(row["speedup_free"] for row in rows),
        "speedup_bound": fmean(row["speedup_bound"] for row in rows),
        "bound_over_free_speedup": fmean(row["speedup_bound"] / row["speedup_free"] for row in rows),
        "bound_over_free_plain_lowest": min(row["bound_over_free_plain"] for row in rows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    limit: Limit = 8,
    max_tokens: AnswerTokens = 128,
    temperature: Temperature = 0.0,
    schemas: Annotated[str, typer.Option(metavar="NAME,...", help="Which schemas; all, if none is named.")] = "",
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Tokens per second with a schema and without, plain and speculative."""
    assembly = prepare(loaded.config, out)
    (texts,) = (one.prompts for one in read_sets(assembly, [prompts], limit, max_tokens))
    measure = Measure(temperature=temperature, max_tokens=max_tokens, concurrency=1, seed=seed)
    chosen = [name.strip() for name in schemas.split(",") if name.strip()] or list(SCHEMAS)
    compiler = assembly.grammars
    engines = {PLAIN: plain_engine(assembly), SPECULATIVE: assembly.engine()}
    rows = []
    with counted(len(chosen) * len(texts), "answers") as advance:
        for name in chosen:
            grammar = compiler.compile("json_schema", SCHEMAS[name])
            runs = _turns(engines, texts, grammar, measure, advance)
            rows.append(row_of(name, runs["free"], runs["bound"]))
    summary = summary_of(rows)
    table = table_of(_COLUMNS, rows, caption="tokens/s of steps that read no prompt")
    return conclude(assembly, out, rows, summary, table, *(f"{key}: {summary[key]}" for key in summary))


def _turns(
    engines: Mapping[str, Engine],
    texts: Sequence[Sequence[int]],
    grammar: Grammar,
    measure: Measure,
    advance: Any,
) -> dict[str, dict[str, list[Run]]]:
    """All four in turn, prompt by prompt; a free answer is as long as the bound one."""
    runs: dict[str, dict[str, list[Run]]] = {kind: {name: [] for name in engines} for kind in ("free", "bound")}
    for number, prompt in enumerate(texts):
        asked = request_of(number, prompt, measure, ignore_eos=False)
        for name in rotated(list(engines), number):
            runs["bound"][name].append(generate(engines[name], [replace(asked, grammar=grammar)]))
        longest = max(2, runs["bound"][PLAIN][-1].num_tokens)
        free = request_of(number, prompt, replace(measure, max_tokens=longest))
        for name in rotated(list(engines), number):
            runs["free"][name].append(generate(engines[name], [free]))
        advance(1)
    return runs


def _speed(name: str) -> Column:
    return name, lambda row: f"{row['tokens_per_second'][name]:.1f}"


_COLUMNS: tuple[Column, ...] = (
    ("schema", lambda row: row["schema"]),
    ("tokens", lambda row: str(row["tokens"])),
    *map(_speed, ("free plain", "bound plain", "free speculative", "bound speculative")),
    ("speedup free", lambda row: f"{row['speedup_free']:.2f}"),
    ("speedup bound", lambda row: f"{row['speedup_bound']:.2f}"),
    ("stop", lambda row: f"{100 * row['ended_in_stop']:.0f} %"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)
