"""The `adaptree` command. Every option is derived from `ServiceConfig`, so each knob is written once.

It imports nothing heavy: torch enters only when a command that needs it runs, so that help and typing errors answer
at once. A sub-app (its own module with a `typer.Typer`) joins by one `app.add_typer` line here and keeps the same rule.
"""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Column, Table

from service import __version__
from service.bench.commands import bench_app, check_app
from service.config import SETTINGS, LoadedConfig, panel_of
from service.config_sources import CONFIG_VARIABLE, allowed_values, flag_name, flat_values, load_config
from service.errors import StartupError
from service.ingress.command import ingress
from service.learning.commands import drafter_app, trainer
from service.observability.top import top
from service.training.commands import train_app

STARTUP_EXIT_CODE = 2
_IN_IDENTIFIERS = "__"  # stands for the separator of sections, which Python's names cannot hold
_CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help=f"YAML file with settings; environment variables and flags override it. Also {CONFIG_VARIABLE}.",
    ),
]

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
        given = {name: value for name, value in options.items() if value is not None}
        command(load_config({name.replace(_IN_IDENTIFIERS, "."): value for name, value in given.items()}), **extra)

    keyword = inspect.Parameter.KEYWORD_ONLY
    keywords = [parameter.replace(kind=keyword) for parameter in own]
    settings = {"config": _CONFIG} | {name: _option(name, field) for name, field in SETTINGS.items()}
    keywords += [
        inspect.Parameter(name.replace(".", _IN_IDENTIFIERS), keyword, default=None, annotation=annotation)
        for name, annotation in settings.items()
    ]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__doc__ = command.__doc__
    return run


def _option(name: str, field: FieldInfo) -> object:
    # A section's switches take a value: `--no-section.name` would read badly.
    flag, is_switch = flag_name(name), field.annotation is bool and "." not in name
    return _text_or_switch(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        metavar=None if is_switch else _metavar(field),
        help=_help_text(field),
        rich_help_panel=panel_of(name),
        show_default=False,
    )


def _text_or_switch(flags: str, **words: Any) -> object:
    # Text goes to the settings as it is, so that a bad value is explained in the same words wherever it was set.
    option = typer.Option(flags, **words)
    return Annotated[bool | None, option] if "--no-" in flags else Annotated[str | None, option]


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
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{field.description}" if default in (None, ()) else f"{field.description} Default: {shown}."


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
    values = flat_values(loaded.config.model_dump(mode="json"))  # secrets come out masked
    rows = {name: {"value": values[name], "origin": loaded.origin[name]} for name in SETTINGS}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(Column("setting", no_wrap=True), "value", "from")
    for name, row in rows.items():
        value = row["value"]
        table.add_row(name, "" if value is None else json.dumps(value).strip('"'), str(row["origin"]))
    Console().print(table)


app.add_typer(bench_app(with_settings), name="bench")
app.add_typer(check_app(with_settings), name="check")
app.add_typer(train_app(), name="train")
app.add_typer(drafter_app(with_settings), name="drafter")
app.command("ingress")(ingress)
app.command("top")(top)
app.command("trainer")(with_settings(trainer))
