"""`python -m benchmarks curves`: how many more tokens per step updates can give, by what they cost.

The first queries are served and recorded without learning. A copy of the drafter trains on them, round after round,
and is replayed on the last queries beside the memory, which has seen all answers before. A step takes the better of
two: the 8 likeliest paths of a block, and 8 nodes of the memory. Costs are CPU seconds, and as many plain steps.
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

import torch
import typer

from adaptation.config import AdaptationConfig, Tuning
from adaptation.policy import ARMS, Arm
from adaptation.samples import TrainingSample, example_of, training_sample
from adaptation.timing import completed
from benchmarks.shared import LongestAnswer, PromptFile
from drafters.feedback import QueryFeedback
from drafters.memory.drafter import MemoryDrafter
from drafters.network.model import SpecBlock
from drafters.protocol import Committed, DraftContext, DraftingSizes, MemorySizes
from drafters.training.replay import accepted_of_blocks, walked
from drafters.tree import MAX_DEPTH, DraftTree, VerifyResult
from kernels.layers import Embedding
from kernels.ops import REFERENCE
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
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive

_NODES = 8
_MEMORY_BYTES = 16 << 20
_TEXTS: dict[Arm, int] = {"head": 16, "full": 24}  # of an update
_PLAIN_QUERIES = 5
_ALL = 100_000  # positions of a query, and queries that wait to be kept

Accepted = list[int]
"""Tokens that a draft has right, by position of the answer."""
Counts = Sequence[tuple[int, int]]
"""Tokens and steps, by text."""


class Collector:
    """Keeps the feedback of all queries, in place of the loop that learns."""

    waits = False

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

    def save(self, *, training: bool) -> None:
        """Store nothing."""


class Memory:
    """The memory drafter, which reads one answer after another."""

    def __init__(self) -> None:
        memory = MemorySizes(num_bytes=_MEMORY_BYTES)
        self._drafter = MemoryDrafter(DraftingSizes(max_sequences=1, max_length=8192, max_nodes=_NODES, memory=memory))
        self._rows = torch.tensor([0])

    def read(self, feedback: QueryFeedback) -> Accepted:
        """Read an answer and keep it; return what was right before each of its tokens."""
        query, found = feedback.query, []
        self._drafter.start([DraftContext(0, query.tokens[: query.num_prompt], warm=query.temperature > 0)])
        for place, token in enumerate(query.answer):
            tree, follows = self._drafter.recall(self._rows), torch.tensor([query.answer[place : place + MAX_DEPTH]])
            counts = torch.tensor([follows.shape[1]])
            fates = REFERENCE.fates(tree.tokens, tree.parents, tree.depths, follows, counts)
            found.append(int(fates.came_true.sum()))
            none, given = torch.zeros(0), (self._rows, torch.tensor([[token]]), torch.tensor([1]))
            verdict = DraftTree.empty(1), VerifyResult(none, none, none)  # of which the memory reads nothing
            self._drafter.commit(Committed(*given, *verdict, None, none, none))
        return found


class Scores:
    """Replays of the held-out queries: tokens and steps of each."""

    def __init__(self, adaptive: Adaptive, seen: Sequence[QueryFeedback], queries: Sequence[QueryFeedback]) -> None:
        memory = Memory()
        for feedback in seen:
            memory.read(feedback)
        read = [(example_of(feedback), memory.read(feedback)) for feedback in queries]
        self._texts = [(example, accepted) for example, accepted in read if example is not None]
        self._embed = Embedding(adaptive.loaded.parts.embedding)

    @torch.no_grad()
    def network(self, model: SpecBlock) -> list[Accepted]:
        """Return what blocks have right; no block drafts the first token of an answer."""
        found = (accepted_of_blocks(model, self._embed, example, 1, _NODES).tolist() for example, _ in self._texts)
        return [[0, *blocks][: len(mine)] for blocks, (_, mine) in zip(found, self._texts, strict=True)]

    def counts(self, network: Sequence[Accepted] | None, *, memory: bool = True) -> Counts:
        """Return tokens and steps by text of the network and the memory, or of one of them."""
        kept = [mine if memory else [0] * len(mine) for _, mine in self._texts]
        both = [list(map(max, *pair)) for pair in zip(network or kept, kept, strict=True)]
        return [(len(accepted), walked(torch.tensor(accepted), 1).steps) for accepted in both]


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    train: Annotated[int, typer.Option(min=1, help="Queries to train on.")] = 120,
    held_out: Annotated[int, typer.Option(min=1, help="Queries after them, to replay.")] = 80,
    updates: Annotated[str, typer.Option(metavar="N,...", help="After how many updates to replay.")] = "1,2,4,8,16",
    temperature: Temperature = 0.7,
    max_tokens: LongestAnswer = 96,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Print tokens per step by number of updates, for each kind of update."""
    assembly, measure = prepare(loaded.config, out), Measure(temperature, max_tokens, 1, seed)
    chosen = read_sets(assembly, [prompts], train + held_out, max_tokens)[0].prompts
    if len(chosen) < train + held_out:
        raise StartupError(f"{train + held_out} prompts are needed and there are {len(chosen)}; lower --train")
    requests = [request_of(number, prompt, measure, ignore_eos=False) for number, prompt in enumerate(chosen)]
    plain = generate(plain_engine(assembly), requests[:_PLAIN_QUERIES], ClosedLoop(1))
    step_seconds = median(step.stats.seconds for step in plain.steps)
    with TemporaryDirectory() as folder, recording(assembly, Path(folder)) as (adaptive, collector):
        generate(adaptive.engine, requests, ClosedLoop(1))
        adaptive.worker.ask(lambda: None).result()  # after all queries
        queries = collector.queries
        scores = Scores(adaptive, queries[:train], queries[train:])
        samples = [training_sample(feedback, most_rejected=_ALL) for feedback in queries[:train]]
        marks = sorted(int(number) for number in updates.split(","))
        rows = [row for arm in ARMS for row in curve(adaptive, arm, samples, scores, marks)]
    for row in rows:
        row["plain_steps"] = row["cpu_seconds"] / step_seconds
    summary = {"plain_step_seconds": step_seconds, "tau_of_the_memory": tau_of(scores.counts(None))}
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, section=lambda row: row["arm"]))


@contextmanager
def recording(assembly: Assembly, folder: Path) -> Iterator[tuple[Adaptive, Collector]]:
    """Yield an engine whose queries are recorded and not learnt from."""
    config = AdaptationConfig(enabled=True, train_in="thread")
    tuning = Tuning(queued_queries=_ALL)
    assembly = replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))
    adaptive = build_adaptive(assembly, folder=folder, emit=lambda event: None, tuning=tuning)
    adaptive.worker.loop = collector = Collector()
    adaptive.worker.start()
    try:
        yield adaptive, collector
    finally:
        adaptive.stop()


def curve(
    adaptive: Adaptive, arm: Arm, samples: Sequence[TrainingSample], scores: Scores, marks: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for the drafter as it is, and for each number of updates."""
    trainer, weights = adaptive.learner.training.trainer, adaptive.learner.weights
    trainer.load(weights.train_from_served())
    dealt, spent = cycle(samples), 0.0
    before = scores.network(weights.training)
    for number in range(marks[-1] + 1):
        if number:
            chosen = list(islice(dealt, _TEXTS[arm]))
            began = time.thread_time()
            completed(trainer.update(arm, chosen))
            spent += time.thread_time() - began
        if number in (0, *marks):
            network = scores.network(weights.training) if number else before
            alone, both = scores.counts(network, memory=False), scores.counts(network)
            yield {
                "arm": arm,
                "updates": number,
                "queries": min(len(samples), number * _TEXTS[arm]),
                "cpu_seconds": spent,
                "tau_of_the_network": tau_of(alone),
                "tau": tau_of(both),
                "gain": rate_ratio(both, scores.counts(before)),
            }


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
    ("tau, with the memory", lambda row: f"{row['tau']:.3f}"),
    ("gain", lambda row: shown(row["gain"])),
)
