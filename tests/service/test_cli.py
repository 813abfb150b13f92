"""The command: options derived from the settings, quick help, errors as messages."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service import __version__
from service.cli import app
from service.config import SETTINGS, panel_of
from service.config_sources import flag_name

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


def run_command(*arguments: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**WIDE, **(environ or {})})


def shown(*arguments: str, environ: Mapping[str, str] | None = None) -> dict[str, dict[str, object]]:
    result = CliRunner(env={**WIDE, **(environ or {})}).invoke(app, ["config", "show", "--json", *arguments])
    assert result.exit_code == 0, result.output
    settings: dict[str, dict[str, object]] = json.loads(result.output)
    return settings


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"adaptree {__version__}\n")


def test_help_has_every_setting_with_its_description_and_group() -> None:
    result = CliRunner(env=WIDE | {"COLUMNS": "400"}).invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    for name, field in SETTINGS.items():
        assert flag_name(name) in result.output
        assert str(field.description) in result.output
        assert panel_of(name) in result.output
    assert "Default: 8000." in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["config", "show", "--json"]])
def test_looking_costs_no_import_of_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom service.cli import app\n"
        f"try: app({arguments!r})\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'fastapi', 'prometheus_client'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=WIDE)
    assert result.stdout.splitlines()[-1] == "[]"


def test_show_tells_value_and_origin(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max_sequences: 3\n")
    environ = {"ADAPTREE_DRAIN_SECONDS": "5", "ADAPTREE_ADAPTATION__POLICY": "never"}
    settings = shown("--config", str(file), "--port", "9000", "--no-open-metrics", environ=environ)
    assert list(settings) == list(SETTINGS)
    assert settings["port"] == {"value": 9000, "origin": "flag --port"}
    assert settings["open_metrics"] == {"value": False, "origin": "flag --open-metrics"}
    assert settings["drain_seconds"] == {"value": 5.0, "origin": "environment ADAPTREE_DRAIN_SECONDS"}
    assert settings["max_sequences"] == {"value": 3, "origin": f"file {file}"}
    assert settings["adaptation.policy"] == {
        "value": "never",
        "origin": "environment ADAPTREE_ADAPTATION__POLICY",
    }
    assert settings["model"] == {"value": "smollm2-135m", "origin": "default"}


def test_show_masks_secrets() -> None:
    environ = WIDE | {"ADAPTREE_API_KEYS": "s3cret,other", "ADAPTREE_ADMIN_KEY": "s3cret"}
    for arguments in (["config", "show"], ["config", "show", "--json"]):
        result = CliRunner(env=environ).invoke(app, arguments)
        assert result.exit_code == 0
        assert "s3cret" not in result.output
        assert "***" in result.output


def test_the_table_has_a_row_per_setting() -> None:
    result = CliRunner(env=WIDE).invoke(app, ["config", "show", "--host", "::1"])
    rows = {cells[1].strip(): cells for cells in (line.split("│") for line in result.output.splitlines()) if cells[1:]}
    assert set(rows) == set(SETTINGS)
    assert [cell.strip() for cell in rows["host"][2:4]] == ["::1", "flag --host"]


def test_a_bad_setting_is_a_message_and_exit_code_two() -> None:
    result = run_command("serve", "--port", "70000")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("adaptree cannot start: port = '70000', from flag --port, is invalid:")
    assert "Traceback" not in result.stderr
