"""What `adaptree bench speed --ablate` does around the comparison: load, show progress, print, write the file."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from service.assembly import assemble
from service.bench.ablation import AblationRow, config_for, measure_variants, refuse_impossible, variants_of
from service.bench.conditions import conditions_of, refuse_unwritable, write_report
from service.bench.speed import Measure
from service.bench.speed_report import read_sets
from service.config import ServiceConfig
from service.logging import counting


def run_ablation(
    config: ServiceConfig,
    files: Sequence[Path],
    measures: Sequence[Measure],
    ablations: Sequence[str],
    *,
    weights: Path | None,
    nodes: int,
    limit: int | None,
    observe: int,
    out: Path | None,
) -> bool:
    """Compare variants at every temperature and report; whether all text was that of plain decoding."""
    refuse_unwritable(out)
    refuse_impossible(ablations, weights, [measure.temperature for measure in measures])
    assembly = assemble(config_for(config, weights))
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    variants = variants_of(assembly, ablations, weights)
    rows: list[AblationRow] = []
    with counting() as progress:
        task = progress.add_task("", total=len(measures) * sum(len(prompts.prompts) for prompts in sets))
        for measure in measures:
            progress.update(task, description=f"T = {measure.temperature:g}")
            rows += measure_variants(
                assembly,
                sets,
                variants,
                measure,
                nodes=nodes,
                observe=observe,
                advance=lambda done: progress.advance(task, done),
            )
    Console().print(_table(rows, nodes))
    mismatched = sum(row.mismatched_tokens for row in rows)
    summary = {"variants": len(variants), "nodes": nodes, "mismatched_tokens": mismatched}
    write_report(out, conditions_of(assembly), [row.as_json() for row in rows], summary)
    return mismatched == 0


def _table(rows: Sequence[AblationRow], nodes: int) -> Table:
    alphas = [f"alpha {depth}" for depth in range(1, len(rows[0].alpha) + 1)]
    table = Table("ablation", "variant", "T", "tau", "speedup", "nodes", *alphas, "tokens", "mismatched")
    for row in rows:
        measured = (f"{row.temperature:g}", f"{row.tau:.2f}", f"{row.speedup:.2f}", f"{row.nodes_per_step:.1f}")
        shares = ("-" if share.rate is None else f"{share.rate:.2f}" for share in row.alpha)
        table.add_row(row.ablation, row.variant, *measured, *shares, f"{row.tokens:,}", str(row.mismatched_tokens))
    table.caption = (
        f"the trained drafter alone, at most {nodes} nodes a step; nodes: verified per step; speedup over plain "
        "decoding; alpha k: share of drafts with the true token at depth k, of those with the true one at k - 1"
    )
    return table
