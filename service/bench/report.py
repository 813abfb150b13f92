"""Tables of an experiment's rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.table import Table

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A title and what stands below it."""

    title: str
    cell: Callable[[Row], str]


def table_of(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    caption: str | None = None,
    section: Callable[[Row], object] = lambda row: None,
) -> Table:
    """One line per row; a rule wherever `section` changes."""
    table = Table(*(column.title for column in columns), caption=caption)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        ends = following is None or section(row) != section(following)
        table.add_row(*(column.cell(row) for column in columns), end_section=ends)
    return table
