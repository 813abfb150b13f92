"""Log set-up: one handler on standard error, as text for people or as one JSON object per line for machines.

It decides the form of messages only; what is worth saying is up to each module's own logger.
"""

import json
import logging
import sys
from datetime import UTC, datetime

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
