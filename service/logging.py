"""Output on standard error: log records, as text or as one JSON object per line, and progress bars. If standard error
is not a terminal, a bar becomes a line per tenth of the task."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

_TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}

# Libraries that log every request at level info, or repeat what is logged here.
_CHATTY = ("httpx", "httpcore", "uvicorn.access", "filelock", "urllib3", "uvicorn.error")


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line; `extra` values of a log call become fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as JSON."""
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
    # `refuse_incomplete` says what matters; the model's own recurrent layers run for the trial alone.
    for name in ("modeling_utils", "integrations.hub_kernels"):
        logging.getLogger(f"transformers.{name}").setLevel(logging.ERROR)


Advance = Callable[[float, str], None]
"""Sets the amount that is done so far, and the note next to the bar."""

_LINES = 10  # log lines for a whole task


@contextmanager
def bar(title: str, total: float) -> Iterator[Advance]:
    """Show a progress bar while the block runs, or log lines, one per tenth, if standard error is not a terminal.
    Yields the function that advances it."""
    console, lines = Console(stderr=True), 0
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, note="")

        def advance(done: float, note: str) -> None:
            nonlocal lines
            progress.update(task, completed=done, note=note)
            share = done / total if total else 1.0
            if progress.disable and int(_LINES * share) > lines:
                lines = int(_LINES * share)
                say(" ".join(filter(None, (title, f"{100 * share:.0f} %", note))))

        yield advance


def say(text: str) -> None:
    """Print one line on standard error."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
