"""What a client can tell of past answers: one of some prompts was answered for somebody, and a client that asks all of
them guesses which it was, by seconds and by steps, and is shown other trees than before or not."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from drafters.protocol import MemorySizes
from service.assembly import Assembly
from service.bench.commands import AnswerTokens, MorePromptFiles, Out, PromptFiles
from service.bench.experiment import Column, Row, conclude, counted, prepare, read_sets, table_of
from service.config import LoadedConfig
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams, Scope, SpeculationParams

_VICTIM = Scope("one", "u", separate_names=True)
WALLS = {
    "none": (_VICTIM, _VICTIM),
    "name": (_VICTIM, replace(_VICTIM, name="v")),
    "key": (_VICTIM, replace(_VICTIM, key="two")),
    "no keys": (Scope(name="u"), Scope(name="v")),
}
"""Whose answers are guessed, and by whom."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one answer."""

    seconds: float
    steps: int
    trees: list[set[str]]  # paths of each step's


def told(seen: Sequence[Seen], before: Sequence[Seen], asked: int) -> dict[str, float]:
    """By seconds and by steps: 1 where the prompt that saves most is the one that was asked, its share where several
    save as much. And the share of answers of which any tree is another one than before."""
    pairs = list(zip(before, seen, strict=True))
    saved = {
        "by_seconds": [then.seconds - now.seconds for then, now in pairs],
        "by_steps": [float(then.steps - now.steps) for then, now in pairs],
    }
    right = {way: (of[asked] == max(of)) / of.count(max(of)) for way, of in saved.items()}
    return {**right, "trees_changed": sum(then.trees != now.trees for then, now in pairs) / len(pairs)}


def _ask(engine: Engine, prompt: Sequence[int], scope: Scope, max_tokens: int, *, traced: bool, store: bool) -> Seen:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    speculation = SpeculationParams(trace=traced)
    began, steps, trees = time.perf_counter(), 0, []
    engine.add(
        GenerationRequest(
            request_id="asked", prompt=prompt, sampling=sampling, scope=scope, store=store, speculation=speculation
        )
    )
    while not engine.idle:
        for output in engine.step().outputs:
            steps += 1
            if output.tree is not None:
                paths: list[str] = []
                for token, parent in zip(output.tree.tokens, output.tree.parents, strict=True):
                    paths.append(f"{paths[parent] if parent >= 0 else ''} {token}")
                trees.append(set(paths))
    return Seen(time.perf_counter() - began, steps, trees)


def _row(assembly: Assembly, wall: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> Row:
    victim, client = WALLS[wall]
    sizes = MemorySizes(
        num_bytes=assembly.config.memory_bytes,
        owners=2 if victim.key else 1,
        scopes=assembly.limits.max_sequences,
        has_keys=bool(victim.key),
    )
    engine = assembly.engine(limits=replace(assembly.limits, memory=sizes))

    def look() -> list[Seen]:
        """What the client, of whom nothing is remembered, sees of each prompt; its traces are requests of their own."""
        plain = [_ask(engine, prompt, client, max_tokens, traced=False, store=False) for prompt in prompts]
        traced = [_ask(engine, prompt, client, max_tokens, traced=True, store=False) for prompt in prompts]
        return [replace(one, trees=other.trees) for one, other in zip(plain, traced, strict=True)]

    look()  # so that prompts are in the prefix cache from here on
    before = look()
    found = []
    with counted(len(prompts), f"wall: {wall}") as advance:
        for asked, prompt in enumerate(prompts):
            engine.forget()
            _ask(engine, prompt, victim, max_tokens, traced=False, store=True)
            found.append(told(look(), before, asked))
            advance(1)
    return {"wall": wall, **{way: sum(one[way] for one in found) / len(found) for way in found[0]}}


def run(
    loaded: LoadedConfig,
    prompts: PromptFiles,
    more_prompts: MorePromptFiles = None,
    limit: Annotated[int, typer.Option(min=2, help="How many prompts may have been asked.")] = 8,
    max_tokens: AnswerTokens = 48,
    out: Out = None,
) -> bool:
    """Which prompt somebody else asked, guessed from what is drafted from past answers. With --budget-policy fixed and
    --drafter memory only past answers differ."""
    assembly = prepare(loaded.config, out)
    sets = read_sets(assembly, [*prompts, *(more_prompts or [])], None, max_tokens)
    texts = [prompt for one in sets for prompt in one.prompts][:limit]
    rows = [_row(assembly, wall, texts, max_tokens) for wall in WALLS]
    caption = f"one of {len(texts)} prompts, chance {1 / len(texts):.3f}"
    summary = {"prompts": len(texts), "chance": 1 / len(texts)}
    return conclude(assembly, out, rows, summary, table_of(_COLUMNS, rows, caption=caption))


_COLUMNS: tuple[Column, ...] = (
    ("wall", lambda row: row["wall"]),
    ("right by seconds", lambda row: f"{row['by_seconds']:.3f}"),
    ("by steps", lambda row: f"{row['by_steps']:.3f}"),
    ("shown trees that differ", lambda row: f"{row['trees_changed']:.3f}"),
)
