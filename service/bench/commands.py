"""The commands `adaptree bench ...` and `adaptree check ...`: options and what results mean.

Imports nothing heavy before a command runs, so that help answers at once.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Literal

import typer

from service.config import LoadedConfig
from service.errors import StartupError

MISMATCH_EXIT_CODE = 1

WithSettings = Callable[[Callable[..., None]], Callable[..., None]]
"""Adds one option per setting to a command, whose first argument then is the configuration."""

PromptFiles = Annotated[
    list[Path],
    typer.Option("--prompts", metavar="FILE...", help="JSONL files with messages, turns or prompt in each line."),
]
MorePromptFiles = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More prompt files.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts of each file.")]
Temperature = Annotated[float, typer.Option(min=0, max=2, help="0 decodes greedily.")]
Temperatures = Annotated[
    list[float], typer.Option(min=0, max=2, help="0 decodes greedily. Give it again for more than one.")
]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Length of each answer.")]
LongestAnswer = Annotated[int, typer.Option(min=1, help="Longest answer.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests in flight at the same time.")]
Mixes = Annotated[
    str | None,
    typer.Option(
        metavar="MIX,...",
        help="Instead of policies: streams of several clients against the same streams of one, with the configured "
        "budget. 12x1: twelve clients of one stream each; 1+11: two clients; long+8: one prompt of 4,000 tokens at a "
        "time, and a client with eight streams. Prompt files and temperatures go to the clients in turn.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32, help="Seed of everything random.")]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Also write the result, with its conditions, as JSON.")
]


def command(run: Callable[..., bool]) -> Callable[..., None]:
    """Logs as configured, and an exit code for what did not hold."""

    @wraps(run)
    def logged(loaded: LoadedConfig, **options: object) -> None:
        from service.logging import configure_logging

        configure_logging(loaded.config.log_level, as_json=loaded.config.log_json)
        if not run(loaded, **options):
            raise typer.Exit(MISMATCH_EXIT_CODE)

    return logged


def bench_app(with_settings: WithSettings) -> typer.Typer:
    app = typer.Typer(help="Measure the running configuration.", no_args_is_help=True)
    for run in (_speed, _load, _shift, _gpu):
        app.command(run.__name__.removeprefix("_"))(with_settings(command(run)))
    return app


def check_app(with_settings: WithSettings) -> typer.Typer:
    app = typer.Typer(help="Check the running configuration.", no_args_is_help=True)
    app.callback()(lambda: None)
    app.command("lossless")(with_settings(command(_lossless)))
    return app


def _speed(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Limit = None,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 128,
    concurrency: Concurrency = 1,
    anatomy: Annotated[bool, typer.Option("--anatomy", help="Also time the parts of a step, on a CPU.")] = False,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Plain against speculative decoding of the same prompts, in turn. Exit code 1 if any token differs."""
    from service.bench.experiment import Measure
    from service.bench.speed import run_speed

    measures = [Measure(value, max_tokens, concurrency, seed) for value in dict.fromkeys(temperature)]
    files = [*prompts, *(more_prompts or [])]
    return run_speed(loaded.config, files, measures, limit=limit, anatomy=anatomy, out=out)


def _load(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    concurrency: Annotated[str, typer.Option(metavar="N,...", help="Requests in flight.")] = "1,2,4,8,16,32",
    policies: Annotated[
        str,
        typer.Option(
            metavar="POLICY,...", help="plain, fixed:N, per_batch_size, per_batch_size:1=32/4=8/16=0 and adaptive."
        ),
    ] = "plain,fixed:8,fixed:16,fixed:32,adaptive",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests for each policy and concurrency; three for each client at least.")
    ] = 64,
    clients: Mixes = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="For --clients: how long each of three contestants serves each mix.")
    ] = 60.0,
    temperature: Temperatures = [0.0],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 64,
    arrival: Annotated[
        Literal["closed", "poisson"], typer.Option(help="closed: so many clients, one request each at a time.")
    ] = "closed",
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests per second that poisson sends.")] = None,
    slo_ttft: Annotated[float, typer.Option(min=0, help="Seconds to the first token that goodput allows.")] = 5.0,
    slo_itl: Annotated[float, typer.Option(min=0, help="Mean seconds per further token that it allows.")] = 0.2,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Budget policies against each other under rising load, or several clients against one. Exit code 1 if any token
    differs."""
    from service.bench.clients import mixes_of, run_clients
    from service.bench.experiment import Measure
    from service.bench.load import LoadPlan, run_load

    if (arrival == "poisson") != (rate is not None):
        raise StartupError("--arrival poisson and --rate need each other")
    files, measures = (*prompts, *(more_prompts or [])), [Measure(one, max_tokens, 1, seed) for one in temperature]
    if clients is not None:
        if rate is not None:
            raise StartupError("--clients takes no --rate: its streams are closed loops")
        return run_clients(loaded.config, mixes_of(clients), files, measures, seconds=seconds, out=out)
    if len(measures) > 1:
        raise StartupError("--temperature: more than one is for --clients; give one")
    plan = LoadPlan(
        files=files,
        concurrency=numbers(concurrency) if rate is None else (loaded.config.max_sequences,),
        policies=policies,
        requests=requests,
        measure=measures[0],
        rate_per_second=rate,
        slo_ttft_seconds=slo_ttft,
        slo_itl_seconds=slo_itl,
    )
    return run_load(loaded.config, plan, out=out)


def _shift(
    loaded: LoadedConfig,
    before: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Prompts of the first half. Give it again to mix several files.")
    ],
    after: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts of the second half, likewise.")
    ] = None,
    queries: Annotated[int, typer.Option(min=2, help="Queries in all.")] = 300,
    policies: Annotated[
        str,
        typer.Option(metavar="POLICY,...", help="Who decides about updates; `never` is what all are compared with."),
    ] = "bandit,always,head_only,full_only,never",
    temperature: Temperature = 0.0,
    max_tokens: LongestAnswer = 64,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Instead of a shift, one mix of all files, so many times over.")
    ] = None,
    concurrency: Concurrency = 1,
    turn_queries: Annotated[
        int, typer.Option(min=1, help="Queries a policy answers before it is the next one's turn.")
    ] = 5,
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds after each turn in which nobody asks, and learning goes on.")
    ] = 0.0,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Leave what each policy has learnt here: `adaptree drafter export --from DIR/POLICY`."
        ),
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the result, with its conditions, as JSON, and a PNG beside it."),
    ] = None,
) -> bool:
    """What learning is worth when traffic changes, training included. Exit code 1 if any token differs."""
    from service.bench.experiment import Measure
    from service.bench.shift import policies_of, run_shift

    return run_shift(
        loaded.config,
        before,
        after or [],
        policies_of(policies),
        Measure(temperature, max_tokens, concurrency, seed),
        queries=queries,
        epochs=epochs,
        turn_queries=turn_queries,
        pause_seconds=pause,
        keep=keep,
        out=out,
    )


def _gpu(
    loaded: LoadedConfig,
    sections: Annotated[
        str, typer.Option(metavar="NAME,...", help="Some of tests,exactness,steps,speed,load,training. Unset: all.")
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="JSONL file. Unset: a built-in set.")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Prompts answered in each measurement of speed.")] = 16,
    copies: Annotated[str, typer.Option(metavar="N,...", help="How wide the served model is made for speed.")] = "4,8",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run every part on a CPU with tiny shapes; the figures say nothing.")
    ] = False,
    out: Out = None,
) -> bool:
    """Confirm and measure this GPU, section by section. Exit code 1 if anything fails or a token differs."""
    from service.bench.gpu import SECTIONS, run_gpu
    from service.bench.gpu_sections import DRY, FULL

    asked = [name.strip() for name in sections.split(",") if name.strip()] or SECTIONS
    unknown = [name for name in asked if name not in SECTIONS]
    if unknown:
        raise StartupError(f"--sections {', '.join(unknown)}: give some of {', '.join(SECTIONS)}")
    plan = DRY if dry_run else replace(FULL, answers=answers, widened=numbers(copies, "--copies"))
    return run_gpu(loaded.config, asked, replace(plan, prompts=prompts), out=out)


def _lossless(
    loaded: LoadedConfig,
    tokens: Annotated[int, typer.Option(min=1, help="Compare at least so many tokens.")] = 20_000,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="JSONL file. Unset: a built-in set.")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare every way of decoding with plain decoding, token by token; with --drafter, its own. Exit code 1 if any
    differs."""
    from service.bench.lossless import run_lossless

    return run_lossless(loaded.config, prompts, num_tokens=tokens, seed=seed, out=out)


def numbers(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """What an option says: positive numbers in a list with commas. Raises StartupError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) for part in parts):
        raise StartupError(f"{option} {text!r}: give positive numbers such as 1,2,4,8")
    return tuple(dict.fromkeys(map(int, parts)))
