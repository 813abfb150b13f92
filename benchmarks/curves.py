"""`python -m benchmarks curves`: how many more tokens per step updates can give, by what they cost.

The first queries are served and recorded without learning. A copy of the drafter trains on them, round after round.
Each version is replayed on the last queries, as the gate does it, and serves them, each time with the memory of the
first queries, with 8 nodes, and with the network in every step. Costs are CPU seconds, and as many plain steps.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import torch
import typer

from adaptation.config import AdaptationConfig, Tuning
from adaptation.policy import ARMS, Arm
from adaptation.samples import TrainingSample, example_of, training_sample
from adaptation.timing import completed
from benchmarks.shared import LongestAnswer, PromptFile
from drafters.feedback import QueryFeedback
from drafters.memory.drafter import MemoryDrafter
from drafters.network.checkpoint import weights_of
from drafters.network.model import SpecBlock
from drafters.training.replay import replay_served
from kernels.layers import Embedding
from service.assembly import Assembly
from service.bench.commands import Out, Seed, Temperature
from service.bench.driver import ClosedLoop, generate
from service.bench.experiment import (
    Column,
    Measure,
    Row,
    conclude,
    plain_engine,
    prepare,
    rate_ratio,
    read_sets,
    request_of,
    shown,
    table_of,
)
from service.config import LoadedConfig
from service.engine.budget import FixedBudget
from service.engine.requests import GenerationRequest
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive

_NODES = 8
_DAMAGE = 0.05  # noise of the first damaged drafter, in standard deviations of a weight's values
_TEXTS: dict[Arm, int] = {"head": 16, "full": 24}  # of an update
_PLAIN_QUERIES = 5
_ALL = 100_000  # positions of a query, and queries that wait to be kept

Counts = Sequence[tuple[int, int]]
"""Tokens and steps, by text."""


class Collector:
    """Keeps the feedback of all queries, in place of the loop that learns."""

    def __init__(self) -> None:
        self.queries: list[QueryFeedback] = []

    def observe(self, feedback: QueryFeedback) -> None:
        """Keep it."""
        self.queries.append(feedback)

    def work(self) -> bool:
        """Train nothing."""
        return False

    def abandon(self) -> None:
        """Train nothing."""

    def recover(self, error: str) -> None:
        """Pass an error on."""
        raise StartupError(error)

    def forget(self, scope: str | None) -> None:
        """Keep the feedback: it is the benchmark's own."""

    def save(self, *, training: bool) -> None:
        """Store nothing."""


class Contest:
    """Replays versions of the drafter on the held-out queries, and serves these queries with them, each time with the
    memory as it was before."""

    def __init__(self, adaptive: Adaptive, collector: Collector, requests: Sequence[GenerationRequest]) -> None:
        """Serve and record the held-out queries with the drafter as it is."""
        self._adaptive, self._requests = adaptive, requests
        self._embed = Embedding(adaptive.loaded.parts.embedding)
        # A drafter that is not given the seconds of its steps asks its network in all of them.
        vars(adaptive.engine.drafter)["timed"] = lambda times: None
        answers = _memory_of(adaptive).past.by_scope()
        self._memory = [tensor for one in answers for tensor in (one.entries, one.weights, one.squares)]
        self._before = [tensor.clone() for tensor in self._memory]
        first = len(collector.queries)
        self.served()
        adaptive.worker.ask(lambda: None).result()  # after all queries
        found = map(example_of, collector.queries[first:])
        self.texts = [text for text in found if text is not None and text.memory is not None]

    def served(self) -> Counts:
        """Serve the queries, and return tokens and steps of each."""
        for tensor, before in zip(self._memory, self._before, strict=True):
            tensor.copy_(before)
        answers = generate(self._adaptive.engine, self._requests, ClosedLoop(1)).answers
        steps = (answer.accepted_per_step for answer in answers)
        return [(sum(accepted) + len(accepted), len(accepted)) for accepted in steps]

    def replayed(self, model: SpecBlock | None, *, memory: bool = True) -> Counts:
        """Return tokens and steps by text of the network and the memory, or of one of them."""
        texts = self.texts if memory else [replace(text, memory=None) for text in self.texts]
        return [(done.tokens, done.steps) for done in (replay_served(model, self._embed, text) for text in texts)]

    def versions(self, arm: str, before: tuple[Counts, Counts], number: int) -> Row:
        """Return the figures of the training copy. `before`: tokens and steps of the first version, replayed and
        served."""
        weights = self._adaptive.learner.weights
        model = weights.candidate()
        replayed, alone = self.replayed(model), self.replayed(model, memory=False)
        weights.adopt(weights_of(weights.training))
        served = self.served()
        return {
            "arm": arm,
            "updates": number,
            "tau_of_the_network": tau_of(alone),
            "tau": tau_of(replayed),
            "gain": rate_ratio(replayed, before[0]),
            "served_tau": tau_of(served),
            "served_gain": rate_ratio(served, before[1]),
        }


def _memory_of(adaptive: Adaptive) -> MemoryDrafter:
    drafter = adaptive.engine.drafter
    if not isinstance(drafter, MemoryDrafter):
        raise StartupError(f"drafter {drafter.name} has no memory; use memory+specblock")
    return drafter


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    train: Annotated[int, typer.Option(min=1, help="Queries to train on.")] = 120,
    held_out: Annotated[int, typer.Option(min=1, help="Queries after them, to replay.")] = 80,
    updates: Annotated[str, typer.Option(metavar="N,...", help="After how many updates to replay.")] = "1,2,4,8,16",
    temperature: Temperature = 0.7,
    max_tokens: LongestAnswer = 96,
    damaged: Annotated[int, typer.Option(min=0, help="Drafters with noise in their weights, to compare.")] = 0,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Print tokens per step, replayed and served, by number of updates, for each kind of update."""
    assembly, measure = prepare(loaded.config, out), Measure(temperature, max_tokens, 1, seed)
    chosen = read_sets(assembly, [prompts], train + held_out, max_tokens)[0].prompts
    if len(chosen) < train + held_out:
        raise StartupError(f"{train + held_out} prompts are needed and there are {len(chosen)}; lower --train")
    requests = [request_of(number, prompt, measure, ignore_eos=False) for number, prompt in enumerate(chosen)]
    plain = generate(plain_engine(assembly), requests[:_PLAIN_QUERIES], ClosedLoop(1))
    step_seconds = median(step.stats.seconds for step in plain.steps)
    with TemporaryDirectory() as folder, recording(assembly, Path(folder)) as (adaptive, collector):
        generate(adaptive.engine, requests[:train], ClosedLoop(1))
        adaptive.worker.ask(lambda: None).result()  # after all queries
        samples = [training_sample(feedback, most_rejected=_ALL) for feedback in collector.queries]
        contest = Contest(adaptive, collector, requests[train:])
        marks = sorted(int(number) for number in updates.split(","))
        begun = contest.replayed(adaptive.learner.weights.candidate()), contest.served()
        rows = [row for arm in ARMS for row in curve(adaptive, arm, samples, contest, begun, marks)]
        rows += damaged_rows(adaptive, contest, begun, damaged)
    for row in rows:
        row["plain_steps"] = row["cpu_seconds"] / step_seconds
    alone = tau_of(contest.replayed(None))
    summary = {"plain_step_seconds": step_seconds, "tau_of_the_memory": alone, **agreement(rows)}
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, section=lambda row: row["arm"]))


@contextmanager
def recording(assembly: Assembly, folder: Path) -> Iterator[tuple[Adaptive, Collector]]:
    """Yield an engine whose queries are recorded and not learnt from."""
    config = AdaptationConfig(enabled=True, train_in="thread")
    tuning, budget = Tuning(queued_queries=_ALL), FixedBudget(_NODES)  # prices of rows change from run to run
    assembly = replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))
    adaptive = build_adaptive(assembly, folder=folder, emit=lambda event: None, budget=budget, tuning=tuning)
    adaptive.worker.loop = collector = Collector()
    adaptive.worker.start()
    try:
        yield adaptive, collector
    finally:
        adaptive.stop()


def curve(
    adaptive: Adaptive,
    arm: Arm,
    samples: Sequence[TrainingSample],
    contest: Contest,
    begun: tuple[Counts, Counts],
    marks: Sequence[int],
) -> Iterator[Row]:
    """Yield a row for the drafter as it is, and for each number of updates."""
    trainer = adaptive.learner.training.trainer
    trainer.load(weights_of(adaptive.learner.weights.anchor))
    dealt, spent = cycle(samples), 0.0
    for number in range(marks[-1] + 1):
        if number:
            chosen = list(islice(dealt, _TEXTS[arm]))
            began = time.thread_time()
            completed(trainer.update(arm, chosen))
            spent += time.thread_time() - began
        if number in (0, *marks):
            queries = min(len(samples), number * _TEXTS[arm])
            yield {**contest.versions(arm, begun, number), "queries": queries, "cpu_seconds": spent}


def damaged_rows(adaptive: Adaptive, contest: Contest, begun: tuple[Counts, Counts], count: int) -> Iterator[Row]:
    """Yield rows of `count` drafters with ever more noise in their weights."""
    weights, drawn = adaptive.learner.weights, torch.Generator().manual_seed(0)
    for number in range(1, count + 1):
        adaptive.learner.training.trainer.load(weights_of(weights.anchor))
        with torch.no_grad():
            for value in weights.training.parameters():
                noise = torch.randn(value.shape, generator=drawn).to(value)
                value.add_(noise, alpha=_DAMAGE * number * float(value.std(correction=0)))
        yield {**contest.versions("damaged", begun, number), "queries": 0, "cpu_seconds": 0.0}


def agreement(rows: Sequence[Row]) -> dict[str, float]:
    """Return Spearman's rank correlation of replayed and served tau over the versions, and the ratio of served to
    replayed gain by least squares."""
    taus = np.array([(row["tau"], row["served_tau"]) for row in rows])
    replayed, served = taus.argsort(0, kind="stable").argsort(0).T
    gains = np.array([(row["gain"][0] - 1, row["served_gain"][0] - 1) for row in rows])
    ratio = (gains[:, 0] * gains[:, 1]).sum() / (gains[:, 0] ** 2).sum()
    return {"rank_correlation": float(np.corrcoef(replayed, served)[0][1]), "served_over_replayed_gain": float(ratio)}


def tau_of(counts: Counts) -> float:
    """Return tokens per step."""
    return sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts)


_COLUMNS: Sequence[Column] = (
    ("update", lambda row: row["arm"]),
    ("updates", lambda row: str(row["updates"])),
    ("queries", lambda row: str(row["queries"])),
    ("CPU seconds", lambda row: f"{row['cpu_seconds']:.1f}"),
    ("plain steps", lambda row: f"{row['plain_steps']:.0f}"),
    ("tau, network alone", lambda row: f"{row['tau_of_the_network']:.3f}"),
    ("tau, replayed", lambda row: f"{row['tau']:.3f}"),
    ("gain", lambda row: shown(row["gain"])),
    ("tau, served", lambda row: f"{row['served_tau']:.3f}"),
    ("gain", lambda row: shown(row["served_gain"])),
)
