"""`python -m benchmarks idle`: what idle time makes of past traffic, beside a memory of the same traffic.

Answers of earlier traffic, whose features `adaptree train features` has read, fill the replay buffer of a server that
learns, and the memory of both servers. Some prompts are answered and recorded, so that versions can be judged. Then the
server is idle for the given minutes, in as many runs as are wanted: it resumes from --state-dir. At the end engines
with and without what was learnt, and plain decoding, answer other prompts in turn.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from adaptation.records import Event
from adaptation.replay_buffer import KeptText, compact
from adaptation.samples import ValidationText
from benchmarks.growing import ratio_column, row_of
from benchmarks.shared import PromptFile
from benchmarks.shift import event_row
from benchmarks.shift_play import Learning, Noted
from drafters.memory.drafter import MemoryDrafter
from drafters.training.corpus import Example, load_examples
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, Seed, Temperatures
from service.bench.driver import ClosedLoop, Run, generate
from service.bench.experiment import (
    PLAIN,
    Column,
    Measure,
    Row,
    conclude,
    counted,
    plain_engine,
    prepare,
    read_sets,
    request_of,
    table_of,
    take_turns,
    warm_up,
)
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.errors import StartupError
from service.learning.adaptive import Adaptive, build_adaptive
from service.learning.features import Manifest
from service.text.prompts import PromptSet

LEARNT, MEMORY, AGAIN = "learnt", "memory alone", "memory again"
_PAIRS = ((LEARNT, MEMORY), (AGAIN, MEMORY), (LEARNT, PLAIN), (MEMORY, PLAIN))
_LONGEST = 512  # tokens of a past text


class Clock:
    """Collects events of learning by the seconds of idle time before them."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.idle_seconds = 0.0

    def note(self, event: Event) -> None:
        """Keep an event."""
        self.events.append((self.idle_seconds, event))

    def let_pass(self, adaptive: Adaptive, seconds: float) -> None:
        """Let learning run without requests. New weights serve at once, as an engine that is woken sees to."""
        with counted(round(seconds), "idle") as advance:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(1.0, left))
                adaptive.learner.weights.between_steps()
                self.idle_seconds = seconds - left
                advance(1)


def filled(adaptive: Adaptive, engines: Sequence[Engine], past: Sequence[Example]) -> None:
    """Give the texts of earlier traffic to the replay buffer and, the last ones, to the sums that a drafter is solved
    from; and their answers to the memories. Raises StartupError for an engine without a memory."""
    texts = [compact(text) for text in past]
    kept = [KeptText(example=text, scope="", client="", value=float(text.top_ids.shape[0])) for text in texts]
    buffers = adaptive.learner.feedback.buffers
    buffers.replay.restore(kept)
    buffers.for_sums.extend(ValidationText(0, text) for text in texts)
    for engine in engines:
        if not isinstance(engine.drafter, MemoryDrafter):
            raise StartupError(f"drafter {engine.drafter.name} has no memory; use memory+specblock")
        for text in past:
            engine.drafter.add_answer("", text.tokens.tolist(), text.length - text.prompt)


def run(
    loaded: LoadedConfig,
    prompts: PromptFile,
    features: Annotated[Path, typer.Option(metavar="DIR", help="Features of the answers of earlier traffic.")],
    practice: Annotated[Path, typer.Option(metavar="FILE", help="Prompts that are answered before the idle time.")],
    more_prompts: MorePromptFiles = None,
    answered: Annotated[int, typer.Option(min=8, max=256, help="Prompts of --practice.")] = 200,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes of idle time.")] = 30.0,
    requests: Annotated[int, typer.Option(min=2, help="Requests of each prompt file.")] = 60,
    temperature: Temperatures = [0.0, 0.7],  # noqa: B006  # read as a signature, never changed
    max_tokens: AnswerTokens = 64,
    seed: Seed = 0,
    out: Out = None,
) -> bool:
    """Compare engines with and without what idle time has made of earlier traffic. Exit code 1 if any token differs."""
    assembly, clock = prepare(loaded.config, out), Clock()
    past = load_examples(Manifest.read(features).shard_paths(features), max_length=_LONGEST)
    sets = read_sets(assembly, [prompts, *(more_prompts or [])], requests, max_tokens)
    (first,) = read_sets(assembly, [practice], answered, max_tokens)
    memories = [assembly.engine(assembly.drafter("memory")) for _ in range(2)]
    folder = loaded.config.state_dir / "adaptation" / f"idle-{assembly.loaded.parts.identity}"
    adaptive = build_adaptive(assembly, folder=folder, emit=clock.note)
    with closing(Learning(adaptive)) as learning:
        filled(adaptive, [adaptive.engine, *memories], past)
        ask = partial(request_of, measure=Measure(0.7, max_tokens, 1, seed), ignore_eos=False)
        served = [ask(number, prompt) for number, prompt in enumerate(first.prompts)]
        for engine in (*memories, adaptive.engine):
            generate(engine, served, ClosedLoop(1))
        learning.go_on()
        clock.let_pass(adaptive, 60.0 * minutes)
        learning.hold()
        status = adaptive.learner.status(adaptive.worker)
        engines = {LEARNT: adaptive.engine, MEMORY: memories[0], AGAIN: memories[1], PLAIN: plain_engine(assembly)}
        rows = measured(engines, sets, [Measure(value, max_tokens, 1, seed) for value in dict.fromkeys(temperature)])
    noted = [{"minutes": at / 60, **event_row(Noted(0, event))} for at, event in clock.events]
    summary = {
        "past_texts": len(past),
        "past_labels": sum(text.length - text.prompt for text in past),
        "minutes": minutes,
        "updates": dict(status.updates),
        "training_seconds": status.training_seconds,
        "publishes": status.publishes,
        "all": rows[-1],
        "mismatched_tokens": sum(row["mismatched_tokens"] for row in rows[:-1]),
        "events": noted,
    }
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows))


def measured(engines: Mapping[str, Engine], sets: Sequence[PromptSet], measures: Sequence[Measure]) -> list[Row]:
    """Let the engines answer all prompts in turn; returns a row for each set and temperature, and one of all."""
    contestants = {name: partial(generate, engine) for name, engine in engines.items()}
    warm_up(contestants, sets[0].prompts[0], measures[0])
    rows, all_runs = list[Row](), {name: list[Run]() for name in engines}
    with counted(len(measures) * sum(len(one.prompts) for one in sets), "requests") as advance:
        for one, measure in product(sets, measures):
            runs = take_turns(one.prompts, contestants, measure, advance)
            rows.append(row_of({"set": one.name, "temperature": measure.temperature}, runs, _PAIRS))
            for name, mine in runs.items():
                all_runs[name] += mine
    return [*rows, row_of({"set": "all", "temperature": None}, all_runs, _PAIRS)]


_COLUMNS: tuple[Column, ...] = (
    ("set", lambda row: f"{row['set']}, T = {row['temperature']}"),
    ("tau, with and without", lambda row: f"{row['tau'][LEARNT]:.2f}, {row['tau'][MEMORY]:.2f}"),
    *(ratio_column(*pair) for pair in _PAIRS),
)
