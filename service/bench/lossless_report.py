"""What `adaptree check lossless` does around the check: load, show progress, print the table, write the file."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import Assembly, assemble
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.lossless import CaseResult, LosslessResult, Mismatch, check
from service.bench.lossless_cases import COMPANIES, EXTRAS, PREFILL_CHUNKS, TEMPERATURES, TRAINED_WAYS, WAYS, Case
from service.bench.lossless_prompts import LOSSLESS_PROMPTS
from service.bench.prompts import read_prompts
from service.config import ServiceConfig
from service.logging import counting
from service.tokenizer import ChatTokenizer

_CHOICES: tuple[tuple[str, Sequence[object], Callable[[Case], object]], ...] = (
    ("temperature", TEMPERATURES, lambda case: case.temperature),
    ("sampling", EXTRAS, lambda case: case.extras),
    ("drafter, nodes", WAYS + TRAINED_WAYS, lambda case: case.way),
    ("company", COMPANIES, lambda case: case.company),
    ("prompt chunks", PREFILL_CHUNKS, lambda case: case.prefill_chunk),
)


def run_lossless(config: ServiceConfig, file: Path | None, *, num_tokens: int, seed: int, out: Path | None) -> bool:
    """Check and report; whether every token was the same."""
    refuse_unwritable(out)
    assembly = assemble(config)
    prompts = built_in_prompts(assembly.tokenizer) if file is None else read_prompts(file, assembly.tokenizer).prompts
    result = _check(assembly, prompts, num_tokens, seed)
    console = Console()
    console.print(_table(result.cases))
    console.print(_verdict(result, assembly), markup=False, highlight=False)
    write_report(out, conditions_of(assembly), [_row(case) for case in result.cases], _summary(result, assembly))
    return result.holds


def built_in_prompts(tokenizer: ChatTokenizer) -> list[list[int]]:
    return [tokenizer.render_chat([{"role": "user", "content": text}]) for text in LOSSLESS_PROMPTS]


def _check(assembly: Assembly, prompts: Sequence[Sequence[int]], num_tokens: int, seed: int) -> LosslessResult:
    with counting() as progress:
        task = progress.add_task("tokens compared", total=num_tokens)

        def advance(result: CaseResult) -> None:
            progress.advance(task, result.tokens_compared)

        return check(assembly, prompts, num_tokens=num_tokens, seed=seed, observe=advance)


def _table(results: Sequence[CaseResult]) -> Table:
    """One line per choice: every case counts once in each section."""
    table = Table("", "choice", "cases", "tokens compared", "accepted", "preemptions", "mismatched")
    for title, values, choice in _CHOICES:
        for value in values:
            mine = [result for result in results if choice(result.case) == value]
            table.add_row(title, str(value), *_totals(mine), end_section=value == values[-1])
    return table


def _totals(results: Sequence[CaseResult]) -> list[str]:
    totals = (
        len(results),
        sum(result.tokens_compared for result in results),
        sum(result.accepted_tokens for result in results),
        sum(result.preemptions for result in results),
        sum(result.mismatched_tokens for result in results),
    )
    return [f"{total:,}" for total in totals]


def _verdict(result: LosslessResult, assembly: Assembly) -> str:
    lines = [
        f"{result.tokens_compared:,} tokens compared in {len(result.cases)} cases, "
        f"{result.mismatched_tokens:,} mismatched; numerics: {assembly.numerics}"
    ]
    if result.shortages and not result.preemptions:
        lines.append("not a proof: slots were made scarce, and still no sequence was preempted")
    return "\n".join([*lines, *(_described(result.first, assembly.tokenizer) if result.first else [])])


def _described(mismatch: Mismatch, tokenizer: ChatTokenizer) -> list[str]:
    place, question = mismatch.position, mismatch.question
    expected, got = mismatch.expected.token_ids[place:], mismatch.got.token_ids[place:]
    return [
        f"first mismatch: {mismatch.case}",
        f"  prompt {question.prompt}, temperature {question.temperature}, extras {question.extras}, "
        f"seed {question.seed}, token {place} of the answer",
        f"  expected {list(expected[:8])} {tokenizer.decode(expected[:8])!r}, end: {mismatch.expected.finish_reason}",
        f"  got      {list(got[:8])} {tokenizer.decode(got[:8])!r}, end: {mismatch.got.finish_reason}",
    ]


def _row(result: CaseResult) -> dict[str, object]:
    return {
        **{title.replace(", ", "_").replace(" ", "_"): str(choice(result.case)) for title, _, choice in _CHOICES},
        "answers": result.answers,
        "tokens_compared": result.tokens_compared,
        "mismatched_tokens": result.mismatched_tokens,
        "accepted_tokens": result.accepted_tokens,
        "preemptions": result.preemptions,
    }


def _summary(result: LosslessResult, assembly: Assembly) -> dict[str, object]:
    return {
        "tokens_compared": result.tokens_compared,
        "mismatched_tokens": result.mismatched_tokens,
        "numerics": assembly.numerics,
        "cases": len(result.cases),
        "preemptions": result.preemptions,
    }
