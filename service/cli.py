"""The `adaptree` command. Every option is derived from `ServiceConfig`, so each knob is written once.

It imports nothing heavy: torch enters only when a command that needs it runs, so that help and typing errors answer
at once. A sub-app (its own module with a `typer.Typer`) joins by one `app.add_typer` line here and keeps the same rule.
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Column, Table

from service import __version__
from service.bench.commands import bench_app, check_app
from service.config import CONFIG_VARIABLE, REMOVED, SETTINGS, LoadedConfig, load_config, panel_of
from service.config_sources import SECTION_SEPARATOR, allowed_values, flag_name, flat_values
from service.errors import StartupError
from service.learning.trainer import trainer
from service.observability.top import top
from service.training.commands import train_app

STARTUP_EXIT_CODE = 2
_REMOVED_SWITCHES = {
    "speculation": "--speculation/--no-speculation",
    "isolate_clients": "--isolate-clients/--no-isolate-clients",
    "no_prefix_cache": "--no-prefix-cache",
}
_IN_IDENTIFIERS = "__"  # stands for the separator of sections, which Python's names cannot hold

app = typer.Typer(
    name="adaptree",
    help="An OpenAI-compatible language model server that decodes by tree speculation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def main() -> None:
    """The console entry: what an operator can cause ends in a message, never in a traceback."""
    try:
        app()
    except StartupError as error:
        print(f"adaptree cannot start: {error}", file=sys.stderr)
        sys.exit(STARTUP_EXIT_CODE)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per setting, plus --config, beside the options it declares itself.

    Its first argument is the configuration that they add up to.
    """
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(**options: object) -> None:
        extra = {parameter.name: options.pop(parameter.name) for parameter in own}
        command(
            load_config({_setting_of(name): value for name, value in options.items() if value is not None}), **extra
        )

    settings = [_setting_parameter(name, field) for name, field in SETTINGS.items()]
    settings += [_removed_parameter(name) for name in REMOVED]
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*keywords, _config_parameter(), *settings])  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    return run


def _config_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        metavar="FILE",
        help=f"YAML file with settings; environment variables and flags override it. Also {CONFIG_VARIABLE}.",
    )
    return _keyword("config", Annotated[Path | None, option])


def _setting_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    # A section's switches take a value: `--no-section.name` would read badly.
    is_switch = field.annotation is bool and SECTION_SEPARATOR not in name
    option = typer.Option(
        f"{flag_name(name)}/--no-{flag_name(name)[2:]}" if is_switch else flag_name(name),
        metavar=None if is_switch else _metavar(field),
        help=_help_text(field),
        rich_help_panel=panel_of(name),
        show_default=False,
    )
    # Text goes to the settings as it is, so that a bad value is explained in the same words wherever it was set.
    annotation = Annotated[bool | None, option] if is_switch else Annotated[str | None, option]
    return _keyword(name, annotation)


def _removed_parameter(name: str) -> inspect.Parameter:
    """An option that there was: `load_config` says what has taken its place."""
    flag = flag_name(name)
    if name not in _REMOVED_SWITCHES:
        return _keyword(name, Annotated[str | None, typer.Option(flag, hidden=True)])
    return _keyword(name, Annotated[bool | None, typer.Option(_REMOVED_SWITCHES[name], hidden=True)])


def _setting_of(parameter: str) -> str:
    return parameter.replace(_IN_IDENTIFIERS, SECTION_SEPARATOR)


def _keyword(name: str, annotation: object) -> inspect.Parameter:
    identifier = name.replace(SECTION_SEPARATOR, _IN_IDENTIFIERS)
    return inspect.Parameter(identifier, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(field: FieldInfo) -> str:
    choices = allowed_values(field)
    if choices.startswith("one of "):
        return choices.removeprefix("one of ").replace(", ", "|")
    kind = str(field.annotation)
    if field.annotation is bool:
        return "true|false"
    return "INTEGER" if "int" in kind else "NUMBER" if "float" in kind else "TEXT"


def _help_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is None or default == ():
        return str(field.description)
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    return f"{field.description} Default: {shown}."


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"adaptree {__version__}")
        raise typer.Exit


@app.command("serve")
@with_settings
def _serve(loaded: LoadedConfig) -> None:
    """Serve the model over HTTP until interrupted."""
    from service.logging import configure_logging
    from service.serve import serve

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    serve(loaded.config)


@config_app.command("show")
@with_settings
def _show(
    loaded: LoadedConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print the settings in force and where each was set; options here act as they would on serve."""
    rows = _shown_settings(loaded)
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(Column("setting", no_wrap=True), "value", "from")
    for name, row in rows.items():
        value = row["value"]
        table.add_row(name, "" if value is None else json.dumps(value).strip('"'), str(row["origin"]))
    Console().print(table)


def _shown_settings(loaded: LoadedConfig) -> dict[str, dict[str, object]]:
    values = flat_values(loaded.config.model_dump(mode="json"))  # secrets come out masked
    return {name: {"value": values[name], "origin": loaded.origin[name]} for name in SETTINGS}


app.add_typer(bench_app(with_settings), name="bench")
app.add_typer(check_app(with_settings), name="check")
app.add_typer(train_app(), name="train")
app.command("top")(top)
app.command("trainer")(with_settings(trainer))
