"""Bars for everything that takes long. Knows nothing of what is done.

They go to the error stream, so that the output can be piped. Where that is no terminal, as in a container's log, there
is a line for each tenth instead, for a bar would show nothing before the end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

Advance = Callable[[float, str], None]
"""Set how much is done in all, and a note to show beside the bar."""

_LINES = 10  # for a whole task


class Bars(Progress):
    """One for each task, or lines."""

    def __init__(self, *columns: ProgressColumn) -> None:
        console = Console(stderr=True)
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._lines: dict[TaskID, int] = {}

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        """A line, if there is no bar and the next one is due."""
        task = self._tasks[task_id]
        lines = int(_LINES * task.percentage / 100)
        if self.disable and lines > self._lines.get(task_id, 0):
            self._lines[task_id] = lines
            words = (task.description, f"{task.percentage:.0f} %", task.fields.get("note", ""))
            say(" ".join(filter(None, words)))


def counting() -> Bars:
    """Bars that say how many of how many are done."""
    return Bars(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())


@contextmanager
def bar(title: str, total: float) -> Iterator[Advance]:
    """One bar while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(done: float, note: str) -> None:
            progress.update(task, completed=done, note=note)

        yield advance


def say(text: str) -> None:
    """One line for the person who waits."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
