"""`adaptree bench speed`: plain against speculative decoding of the same prompts, in one process and in turn."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig

from service.assembly import Assembly
from service.bench.driver import Answer, Run, generate
from service.bench.experiment import (
    PLAIN,
    SPECULATIVE,
    Column,
    Contestant,
    Measure,
    Row,
    conclude,
    counted,
    decode_tokens_per_second,
    mismatches,
    plain_engine,
    prepare,
    read_sets,
    table_of,
    take_turns,
    tau,
    tokens_per_second,
    warm_up,
)
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest
from service.engine.weights import resolve
from service.prompts import PromptSet


class TransformersPeer:
    """Hugging Face `generate` with everything as it comes: stock model code, stock attention, its own cache."""

    def __init__(self, assembly: Assembly) -> None:
        config = assembly.config
        model = AutoModelForCausalLM.from_pretrained(
            resolve(config.model_source, cache_dir=config.state_dir / "cache"),
            revision=config.revision or "main",
            dtype=assembly.loaded.model.dtype,
            use_safetensors=True,
            trust_remote_code=False,
        )
        self._model = model.eval().requires_grad_(False).to(assembly.target.device)
        # Its own defaults (sampling, end of text) would win over anything left unset in a call.
        self._model.generation_config = GenerationConfig(pad_token_id=0)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[GenerationRequest]) -> Run:
        """Answer all requests in one batch, each with exactly as many tokens as it asks for at most."""
        start, params = time.perf_counter(), requests[0].sampling
        prompts = [torch.tensor(request.prompt, device=self._model.device) for request in requests]
        tokens = pad_sequence(prompts, batch_first=True, padding_side="left")  # [batch, length]
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")
        torch.manual_seed(params.seed)
        sampled = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        how = sampled if params.temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=params.max_tokens, pad_token_id=0, **how)
        output = self._model.generate(tokens, attention_mask=mask, generation_config=config)
        assert isinstance(output, Tensor)
        answers: list[list[int]] = output[:, tokens.shape[1] :].tolist()
        seconds = time.perf_counter() - start
        return Run(tuple(Answer(tuple(answer), "", "length") for answer in answers), (), seconds)


def contestants_of(assembly: Assembly, peer: Literal["transformers"] | None = None) -> dict[str, Contestant]:
    """Plain decoding, the configured speculation, and another engine, all on the same weights."""
    engines = {PLAIN: plain_engine(assembly), SPECULATIVE: assembly.engine()}
    ours: dict[str, Contestant] = {name: partial(generate, engine) for name, engine in engines.items()}
    return ours if peer is None else {**ours, peer: TransformersPeer(assembly)}


def measure_set(
    prompts: PromptSet,
    contestants: Mapping[str, Contestant],
    measure: Measure,
    advance: Callable[[int], None] = lambda prompts: None,
) -> Row:
    """Let every contestant answer every prompt; tokens per second include reading them, but for `decode`."""
    runs = take_turns(prompts.prompts, contestants, measure, advance)
    plain, speculative = runs[PLAIN], runs[SPECULATIVE]
    speeds = {name: tokens_per_second(mine) for name, mine in runs.items()}
    decode = [decode_tokens_per_second(mine) for mine in (plain, speculative)]
    steps = [step for run in speculative for step in run.steps]
    accepted = Counter[str]()
    for step in steps:
        accepted.update(step.stats.accepted_by_source)
    return {
        "set": prompts.name,
        "temperature": measure.temperature,
        "concurrency": measure.concurrency,
        "prompts": len(prompts.prompts),
        "tokens": sum(run.num_tokens for run in plain),
        "plain_tokens_per_second": speeds[PLAIN],
        "speculative_tokens_per_second": speeds[SPECULATIVE],
        "speedup": speeds[SPECULATIVE] / speeds[PLAIN],
        "plain_decode_tokens_per_second": decode[0],
        "speculative_decode_tokens_per_second": decode[1],
        "decode_speedup": decode[1] / decode[0] if decode[0] else 1.0,
        "tau": tau(speculative),
        "draft_share": sum(step.stats.draft_seconds for step in steps) / sum(step.seconds for step in steps),
        "mismatched_tokens": mismatches(plain, speculative),
        "accepted_by_source": dict(sorted(accepted.items())),  # a token that several had proposed counts for each
        "peers": {name: speed for name, speed in speeds.items() if name not in (PLAIN, SPECULATIVE)},
    }


def summary_of(rows: Sequence[Row]) -> dict[str, object]:
    """All sets together, and by temperature; means over sets, that of the speedup geometric."""
    temperatures = dict.fromkeys(row["temperature"] for row in rows)
    groups = [[row for row in rows if row["temperature"] == temperature] for temperature in temperatures]
    return {
        **_means(rows),
        "by_temperature": [{"temperature": mine[0]["temperature"], **_means(mine)} for mine in groups],
    }


def _means(rows: Sequence[Row]) -> dict[str, object]:
    return {
        "sets": len(rows),
        "tokens": sum(row["tokens"] for row in rows),
        "speedup": geometric_mean([row["speedup"] for row in rows]),
        "lowest_speedup": min(row["speedup"] for row in rows),
        "tau": fmean(row["tau"] for row in rows),
        "draft_share": fmean(row["draft_share"] for row in rows),
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows),
    }


def run_speed(
    config: ServiceConfig,
    files: Sequence[Path],
    measures: Sequence[Measure],
    *,
    limit: int | None,
    peer: Literal["transformers"] | None,
    out: Path | None,
) -> bool:
    """Measure all files and report; whether plain and speculative text were the same."""
    assembly = prepare(config, out)
    sets = read_sets(assembly, files, limit, measures[0].max_tokens)
    contestants = contestants_of(assembly, peer)
    warm_up(contestants, sets[0].prompts[0], measures[0])
    rows = []
    with counted(len(measures) * sum(len(prompts.prompts) for prompts in sets)) as advance:
        for measure, prompts in product(measures, sets):
            advance(0, f"{prompts.name}, T = {measure.temperature:g}")
            rows.append(measure_set(prompts, contestants, measure, advance))
    summary = summary_of(rows)
    return conclude(assembly, out, rows, summary, _table(rows, summary))


_COLUMNS: tuple[Column, ...] = (
    ("set", lambda row: row["set"]),
    ("T", lambda row: f"{row['temperature']:g}"),
    ("tokens", lambda row: f"{row['tokens']:,}"),
    ("plain", lambda row: f"{row['plain_tokens_per_second']:.1f}"),
    ("speculative", lambda row: f"{row['speculative_tokens_per_second']:.1f}"),
    ("speedup", lambda row: f"{row['speedup']:.2f}"),
    ("plain, decode", lambda row: f"{row['plain_decode_tokens_per_second']:.1f}"),
    ("speculative, decode", lambda row: f"{row['speculative_decode_tokens_per_second']:.1f}"),
    ("speedup, decode", lambda row: f"{row['decode_speedup']:.2f}"),
    ("tau", lambda row: f"{row['tau']:.2f}"),
    ("drafting", lambda row: f"{100 * row['draft_share']:.1f} %"),
    ("mismatched", lambda row: str(row["mismatched_tokens"])),
)


_CAPTION = (
    "speeds in tokens per second, prompts included; decode: without the steps that read prompts; "
    "mean: over sets, that of the speedup geometric"
)


def _peer_columns(name: str) -> list[Column]:
    return [
        (name, lambda row: f"{row['peers'][name]:.1f}"),
        (f"plain / {name}", lambda row: f"{row['plain_tokens_per_second'] / row['peers'][name]:.2f}"),
        (f"speculative / {name}", lambda row: f"{row['speculative_tokens_per_second'] / row['peers'][name]:.2f}"),
    ]


def _table(rows: Sequence[Row], summary: dict[str, Any]) -> Table:
    """The rows, and below them each temperature's means."""
    columns = [*_COLUMNS, *(column for name in rows[0]["peers"] for column in _peer_columns(name))]
    table = table_of(columns, rows, caption=_CAPTION, section=lambda row: row["temperature"])
    for means in summary["by_temperature"]:
        quality = [f"{means['tau']:.2f}", f"{100 * means['draft_share']:.1f} %", str(means["mismatched_tokens"])]
        speeds = ["", "", f"{means['speedup']:.2f}", "", "", ""]
        table.add_row("mean", f"{means['temperature']:g}", f"{means['tokens']:,}", *speeds, *quality)
    return table
