"""What goes to standard error: log records, as text or as one JSON object per line, and progress bars for what takes
long. Where standard error is no terminal, as in a container's log, a bar is a line for each tenth instead.
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

# Libraries that log every request they make or serve at "info".
_CHATTY = ("httpx", "httpcore", "uvicorn.access", "filelock", "urllib3")


class JsonFormatter(logging.Formatter):
    """One object per line; what a caller passed as `extra` becomes fields of its own."""

    def format(self, record: logging.LogRecord) -> str:
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
    """Send everything from `level` up to standard error; replaces any earlier set-up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else logging.Formatter(_TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


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


def counting(*columns: ProgressColumn) -> Bars:
    """Bars that say how many of how many are done, or what these columns say."""
    middle = columns or (MofNCompleteColumn(),)
    return Bars(TextColumn("{task.description}"), BarColumn(), *middle, TimeRemainingColumn())


@contextmanager
def bar(title: str, total: float) -> Iterator[Advance]:
    """One bar while the block runs."""
    with counting(TaskProgressColumn(), TextColumn("{task.fields[note]}")) as progress:
        task = progress.add_task(title, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)


def say(text: str) -> None:
    """One line for the person who waits."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
