"""The commands `adaptree bench ...` and `adaptree check ...`, and command-line options that benchmarks share.

Heavy modules are imported only when a command runs, so that --help is fast.
"""

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated

import typer

from service.config import LoadedConfig
from service.errors import StartupError

MISMATCH_EXIT_CODE = 1

WithSettings = Callable[[Callable[..., None]], Callable[..., None]]
"""Adds one option per setting to a command whose first argument is the configuration."""

PromptFiles = Annotated[
    list[Path],
    typer.Option("--prompts", metavar="FILE...", help="JSONL files with messages, turns or prompt in each line."),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="JSONL file. Unset: a built-in set.")
]
MorePromptFiles = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompt files.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Largest number of prompts of each file.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 decodes greedily.")]
Temperatures = Annotated[list[float], typer.Option(min=0, max=2, help="0 decodes greedily. Repeatable.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Length of each answer, in tokens.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight at a time.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of all randomness.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the result, with its conditions, as JSON.")
]


def command(run: Callable[..., bool]) -> Callable[..., None]:
    """Wrap a command: configure logging before it runs, and exit with code 1 if it returns False."""

    @wraps(run)
    def logged(loaded: LoadedConfig, **options: object) -> None:
        from service.logging import configure_logging

        configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
        if not run(loaded, **options):
            raise typer.Exit(MISMATCH_EXIT_CODE)

    return logged


def bench_app(with_settings: WithSettings) -> typer.Typer:
    """Build the command group `adaptree bench`."""
    app = typer.Typer(help="Measure speed with these settings.", no_args_is_help=True)
    for run in (_serve, _speed):
        app.command(run.__name__.removeprefix("_"))(with_settings(command(run)))
    return app


def check_app(with_settings: WithSettings) -> typer.Typer:
    """Build the command group `adaptree check`."""
    app = typer.Typer(help="Check that speculation changes no token.", no_args_is_help=True)
    app.callback()(lambda: None)
    app.command("lossless")(with_settings(command(_lossless)))
    return app


def _serve(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    servers: Annotated[
        str, typer.Option(metavar="NAME[:SETTING=VALUE/...],...", help="plain drafts nothing; other names are free.")
    ] = "plain,adaptive",
    against: Annotated[list[str] | None, typer.Option(metavar="NAME=URL", help="Another OpenAI server.")] = None,
    api_key: Annotated[str, typer.Option(help="Key of the servers of --against.")] = "none",
    temperature: Temperature = 0.0,
    max_tokens: AnswerTokens = 128,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1",
    stream: Annotated[bool, typer.Option(help="Ask for streams.")] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Continue after the model's end token.")] = True,
    extra_body: Annotated[str, typer.Option(metavar="JSON", help='More fields, as in {"top_k": 20}.')] = "{}",
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Measure what clients get over HTTP, from servers that this command starts and from others, in turn. Exit code 1
    if any token differs."""
    from service.bench.serve import Entrants, bodies_of, configurations, run_serve

    fields = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": ignore_eos, "seed": seed}
    try:
        fields |= json.loads(extra_body)
    except (ValueError, TypeError) as error:
        raise StartupError(f"--extra-body is no JSON object: {error}") from error
    others = dict(server.partition("=")[::2] for server in against or ())
    ours = configurations(servers, others)
    entrants = Entrants(loaded.config, ours, others, api_key, stream)
    sets = {file.stem: bodies_of(file, limit, fields) for file in (*prompts, *(more_prompts or ()))}
    return run_serve(entrants, sets, numbers(concurrency), out=out)


def _speed(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight at a time.")] = 1,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare plain with speculative decoding of the same prompts, in turn, in this process and without HTTP (adaptree
    bench serve measures what clients get). Exit code 1 if any token differs."""
    from service.bench.experiment import Measure
    from service.bench.speed import run_speed

    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    files = [*prompts, *(more_prompts or [])]
    return run_speed(loaded.config, files, measures, limit=limit, out=out)


def _lossless(
    loaded: LoadedConfig,
    tokens: Annotated[int, typer.Option(min=1, help="Least number of tokens to compare.")] = 20_000,
    prompts: PromptFile = None,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare every way of decoding with plain decoding, token by token; with --drafter, that drafter only. Exit code 1
    if any differs."""
    from service.bench.lossless import run_lossless

    return run_lossless(loaded.config, prompts, num_tokens=tokens, seed=seed, out=out)


def numbers(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """Parse a comma-separated list of positive integers, without repetitions. Raises StartupError naming the option."""
    parts = names(text)
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise StartupError(f"{option} {text!r}: give positive numbers such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))


def names(text: str) -> list[str]:
    """Split a comma-separated list; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]
