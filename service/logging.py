"""Output on standard error: log records, as text or as one JSON object per line, and progress bars. Where standard
error is no terminal, a bar becomes a line per tenth of the task.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
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

_TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

# Libraries that log at "info" every request they make or serve, or what is logged here in other words.
_CHATTY = ("httpx", "httpcore", "uvicorn.access", "filelock", "urllib3", "uvicorn.error")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line; `extra` values of a call become fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logging(level: str, *, as_json: bool) -> None:
    """Log records of at least `level` to standard error; replaces an earlier configuration."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


Advance = Callable[[float, str], None]
"""Sets how much is done in total, and the note beside the bar."""

_LINES = 10  # for a whole task


class Bars(Progress):
    """Progress bars; log lines if standard error is no terminal."""

    def __init__(self, *columns: ProgressColumn) -> None:
        console = Console(stderr=True)
        super().__init__(*columns, console=console, disable=not console.is_terminal)
        self._lines: dict[TaskID, int] = {}

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task by a number of steps."""
        super().advance(task_id, advance)
        self._print_line(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Change a task."""
        super().update(task_id, **changes)
        self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        """Print a line if there is no bar and the next tenth is done."""
        task = self._tasks[task_id]
        lines = int(_LINES * task.percentage / 100)
        if self.disable and lines > self._lines.get(task_id, 0):
            self._lines[task_id] = lines
            words = (task.description, f"{task.percentage:.0f} %", task.fields.get("note", ""))
            say(" ".join(filter(None, words)))


def counting(*columns: ProgressColumn) -> Bars:
    """Bars with a count of finished steps, or with the given columns."""
    middle = columns or (MofNCompleteColumn(),)
    return Bars(TextColumn("{task.description}"), BarColumn(), *middle, TimeRemainingColumn())


@contextmanager
def bar(title: str, total: float) -> Iterator[Advance]:
    """Show one bar while the block runs."""
    with counting(TaskProgressColumn(), TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task(title, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)


def say(text: str) -> None:
    """Print one line."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
