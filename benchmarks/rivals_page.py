"""`python -m benchmarks.rivals_page`: writes the tables and charts of docs/rivals.md and of the README, between their
marks, from docs/results.

Figures of several runs stand one after the other, in the order of the runs; bars are their median. Brackets are 95 %
intervals.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

from benchmarks.rivals import OURS, cell_of
from service.bench.experiment import Row, shown

DOCS = Path(__file__).parents[1] / "docs"
PAGES = DOCS / "rivals.md", DOCS.parent / "README.md"
_MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_WIDTH = 32  # characters of the longest bar
_RUNS = [f"rivals-cpu-{number}.json" for number in (1, 2, 3)]


def rows_of(name: str) -> list[Row]:
    """Return the rows of a result; none if there is no such file."""
    file = DOCS / "results" / name
    return list(json.loads(file.read_text())["rows"]) if file.exists() else []


def table(titles: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Format a table."""
    rows = [titles, ["---"] * len(titles), *lines]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


def bars(values: Mapping[str, float]) -> str:
    """Format a chart: a line with a bar for each value."""
    longest, width = max(values.values(), default=1.0), max(map(len, values), default=0)
    lines = (f"{name:{width}} {'█' * round(_WIDTH * value / longest)} {value:.2f}\n" for name, value in values.items())
    return f"```\n{''.join(lines)}```\n"


def _way(row: Row) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in row["sampling"].items())


def _name(row: Row) -> str:
    return f"{row['engine']} {row['mode']}"


def _ratios(rows: Iterable[Row], key: str) -> str:
    return ", ".join(f"{row[key][0]:.2f}" for row in rows)


def _runs() -> dict[str, dict[str, list[Row]]]:
    """Return the rows of all runs by name and way of sampling; ours stand beside the first engine only."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in (row for file in _RUNS for row in rows_of(file) if "plain_over" in row):
        if row["engine"] == row["beside"]:
            found.setdefault(_name(row), {}).setdefault(_way(row), []).append(row)
    return found


def best_table() -> str:
    """Ours by default over the fastest mode of any other engine, by run and way of sampling."""
    lines, ways = [], list[str]()
    for file in _RUNS:
        least: dict[str, float] = {}
        for row in (row for row in rows_of(file) if row["engine"] != OURS and "default_over" in row):
            least[_way(row)] = min(row["default_over"][0], least.get(_way(row), inf))
        ways = ways or list(least)
        lines.append([f"[{file}](results/{file})", *(f"**{least[way]:.2f}**" for way in ways)])
    return table(["adaptree default over the best other", *ways], lines)


def main_table() -> str:
    """Ours by default over each mode of each engine, by way of sampling."""
    runs = _runs()
    ways = list(dict.fromkeys(way for by_way in runs.values() for way in by_way))
    lines = [[name, *(_ratios(by_way.get(way, ()), "default_over") for way in ways)] for name, by_way in runs.items()]
    return table(["adaptree default over", *ways], lines)


def engines_table() -> str:
    """Speed, first token, memory and texts of each mode of each engine, of all runs at the first way of sampling."""
    lines = []
    for name, by_way in _runs().items():
        rows = next(iter(by_way.values()))
        keys = "output_throughput", "median_ttft_ms", "resident_megabytes"
        figures = (", ".join(f"{row[key]:.0f}" for row in rows) for key in keys)
        texts = (f"{rows[0][key]} of {rows[0]['completed']}" for key in ("same_as_own_plain", "same_as_plain"))
        lines.append([name, *figures, _ratios(rows, "over_own_plain"), *texts])
    titles = "tokens/s", "first token, ms", "MB", "over its own plain", "texts as its own plain", "as ours"
    return table(["", *titles], lines)


def speed_chart() -> str:
    """Tokens a second over llama.cpp without drafts, from ratios to ours without drafts within runs."""
    over = {
        name: 1 / median(row["plain_over"][0] for row in next(iter(ways.values()))) for name, ways in _runs().items()
    }
    return bars({name: value / over["llama.cpp plain"] for name, value in over.items()})


def modes_table(name: str) -> str:
    """All modes of a result, beside their engine's own plain decoding and ours."""
    rows = [row for row in rows_of(name) if row["engine"] == row["beside"]]
    keys = "clients", "output_throughput", "over_own_plain", "plain_over", "default_over"
    lines = (
        [_name(row), _way(row), *(cell_of(key, row) for key in keys), cell_of("failure", row)[-80:]] for row in rows
    )
    titles = "mode", "sampling", "clients", "tokens/s", "over its own plain"
    return table([*titles, "ours without drafts over it", "ours by default", "fails"], lines)


def _sets() -> dict[str, Row]:
    return {name: one for row in rows_of("rivals-sets-cpu.json")[-1:] for name, one in row["by_set"].items()}


def sets_chart() -> str:
    """Ours by default over another engine, by set of prompts."""
    return bars({name: one["default_over"][0] for name, one in _sets().items()})


def sets_table() -> str:
    """Ours without drafts and by default over another engine, by set of prompts."""
    lines = ([name, *(shown(one[key]) for key in ("plain_over", "default_over"))] for name, one in _sets().items())
    return table(["prompts", "without drafts", "default"], lines)


def trees_table(name: str) -> str:
    """Trees over chains of the same drafter, and bars of tokens a forward with 8 nodes."""
    keys = "tree_tokens", "chain_tokens", "tree_nodes", "chain_nodes", "tokens", "sign_test_p", "seconds"
    more = "tree_over_plain", "chain_over_plain", "noise"
    rows = rows_of(name)
    lines = (
        [cell_of(key, row) for key in ("kind", "temperature", "nodes", *keys[:5])]
        + [f"{row['prompts_more']}:{row['prompts_fewer']}", *(cell_of(key, row) for key in (*keys[5:], *more))]
        for row in rows
    )
    titles = "drafter", "T", "nodes", "tokens a forward, tree", "chain", "mean nodes, tree", "chain", "tree over chain"
    tail = "prompts more:fewer", "p", "tokens/s over the fastest chain", "tree over plain", "chain over plain", "A/A"
    ratios = {f"{row['kind']}, T = {row['temperature']:g}": row["tokens"][0] for row in rows if row["nodes"] == _NODES}
    return f"{table([*titles, *tail], lines)}\n{bars(ratios)}"


_NODES = 8
PARTS: Mapping[str, Callable[[], str]] = {
    "best": best_table,
    "main": main_table,
    "engines": engines_table,
    "speed": speed_chart,
    **{name: partial(modes_table, f"rivals-{name}-cpu.json") for name in ("search", "clients", "clients16", "deep")},
    "sets": sets_table,
    "chart": sets_chart,
    "trees": partial(trees_table, "trees-cpu.json"),
    "trees_avx512": partial(trees_table, "trees-avx512-cpu.json"),
}


def written(page: str) -> str:
    """Return a page with the tables and charts between its marks as the results say."""
    return _MARKED.sub(lambda found: found[1] + PARTS[found[2]]() + found[3], page)


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(written(file.read_text()))
