"""One bar for everything that takes long. Knows nothing of what is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Advance = Callable[[float, str], None]
"""Set how much is done in all, and a note to show beside the bar."""


@contextmanager
def bar(title: str, total: float) -> Iterator[Advance]:
    """A bar on standard error while the block runs."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(done: float, note: str) -> None:
            progress.update(task, completed=done, note=note)

        yield advance


def say(text: str) -> None:
    """One line for the person who waits."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
