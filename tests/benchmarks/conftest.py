"""The loaded models that the benchmarks' tests share, and the command line."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from service.errors import StartupError
from tests.service.bench.conftest import assembly, in_no_hurry, trained_assembly

__all__ = ["assembly", "in_no_hurry", "trained_assembly"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`python -m benchmarks ...`, which leaves the log alone: exit code and output. Raises StartupError."""
    monkeypatch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)

    def run(*arguments: object) -> tuple[int, str]:
        runner = CliRunner(env={"COLUMNS": "250", "TERM": "dumb", "NO_COLOR": "1"})
        result = runner.invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, StartupError):
            raise result.exception
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    return run
