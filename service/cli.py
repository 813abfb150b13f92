"""The `adaptree` command. Its options are derived from `ServiceConfig`, so that each setting is declared once.

This module imports nothing heavy: a command imports torch only when it runs, so that help and usage errors appear at
once. Sub-apps (modules with a `typer.Typer`) follow the same rule.
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
from service.config import SETTINGS, LoadedConfig, panel_of
from service.config_sources import CONFIG_VARIABLE, allowed_values, flag_name, flat_values, load_config
from service.errors import StartupError
from service.learning.commands import drafter_app, train_app

STARTUP_EXIT_CODE = 2
_IN_IDENTIFIERS = "__"  # replaces the dot of a section's settings in Python names
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
    help="An OpenAI-compatible server for language models, made faster by tree speculation. Start: adaptree serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show the settings in force.", no_args_is_help=True)
app.add_typer(config_app, name="config")


def main() -> None:
    """Run the command line; a StartupError ends in a message instead of a traceback."""
    try:
        app()
    except StartupError as error:
        print(f"adaptree cannot start: {error}", file=sys.stderr)
        sys.exit(STARTUP_EXIT_CODE)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add --config and one option per setting to a command, which receives the loaded configuration first."""
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
    # Switches of a section take a value, because `--no-section.name` reads badly.
    flag, is_switch = flag_name(name), field.annotation is bool and "." not in name
    option = typer.Option(
        f"{flag}/--no-{flag[2:]}" if is_switch else flag,
        metavar=None if is_switch else _metavar(field),
        help=_help_text(field),
        rich_help_panel=panel_of(name),
        show_default=False,
    )
    # Values are passed on as text, so that a bad one is reported in the same words wherever it was set.
    return Annotated[bool | None, option] if is_switch else Annotated[str | None, option]


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
    """Serve a model over HTTP until interrupted."""
    from service.logging import configure_logging
    from service.serve import serve

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    serve(loaded.config)


@app.command("follow", hidden=True)
def _follow() -> None:
    """Compute a part of a model for the server that has started this command, which says where it is."""
    from service.follow import follow_leader
    from service.logging import configure_logging

    configure_logging("info", as_json=False)
    follow_leader(sys.stdin.read())


@app.command("doctor")
@with_settings
def _doctor(loaded: LoadedConfig) -> None:
    """Check whether serve can start here, and say how to solve each problem. Exit code 1 if there is a problem."""
    from service.doctor import show
    from service.logging import configure_logging

    configure_logging("warning", as_json=False)
    if not show(loaded.config):
        raise typer.Exit(1)


@config_app.command("show")
@with_settings
def _show(
    loaded: LoadedConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Print the settings in force and where each was set; options act as on serve."""
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


@app.command("ingress")
def _ingress(
    replicas: Annotated[str, typer.Option(metavar="URL,...", help="Addresses of the servers, separated by commas.")],
    host: Annotated[str, typer.Option(help="Address to listen on. The servers check keys.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 takes a free one.", min=0, max=65535)] = 8080,
) -> None:
    """Serve several servers of one model under one address; streams continue when a server stops."""
    from service.ingress.app import serve
    from service.logging import configure_logging

    configure_logging("info", as_json=False)
    serve(replicas.split(","), host, port)


@app.command("trainer")
@with_settings
def _trainer(
    loaded: LoadedConfig,
    redis: Annotated[
        str | None, typer.Option("--redis", metavar="URL", help="The same as --adaptation.redis-url.")
    ] = None,
) -> None:
    """Learn for the replicas that share a Redis server, in a separate process that serves no requests."""
    from service.learning.adaptive import train, with_url
    from service.logging import configure_logging

    configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
    train(with_url(loaded.config, redis))
