"""Plain decoding, bad drafters and a perfect one take turns at the same texts, each on an engine of its own.

Bad and perfect drafters stand behind the budget that is served. What a budget has learnt of its drafter belongs to its
engine and lasts from text to text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from drafters.protocol import Drafter
from drafters.random_tree import RandomTreeDrafter
from drafters.registry import NoDrafter
from service.assembly import Assembly
from service.bench.drafters_players import Lies, Replay, ScriptedDrafter
from service.bench.generate import Run, generate
from service.bench.speed import PLAIN, EngineContestant, Measure, requests_from, rotated
from service.engine.budget import FixedBudget
from service.engine.build import EngineLimits
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest
from service.errors import StartupError

RANDOM = "random"
LIAR = "liar"
PERFECT = "perfect"

_WARM_UP_TOKENS = 16


def engines_of(assembly: Assembly, limits: EngineLimits, seed: int) -> dict[str, Engine]:
    """A new engine for every player, all on the assembly's target. Raises StartupError where nothing was measured."""
    if assembly.costs is None:
        raise StartupError("drafters are compared behind a budget by cost: set budget_policy to cost")
    drafters = _drafters(limits, seed, assembly.target.vocab_size, assembly.target.device)
    return {
        PLAIN: assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0), limits=limits),
        **{name: assembly.engine(drafter=drafter, limits=limits) for name, drafter in drafters.items()},
    }


def take_turns(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    measure: Measure,
    advance: Callable[[int], None] = lambda texts: None,
) -> dict[str, list[Run]]:
    """Every player's runs over the texts, by its name. `advance` hears of texts as they are done."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    blind = [EngineContestant(name, engine) for name, engine in engines.items() if name != PERFECT]
    for turn, first in enumerate(range(0, len(prompts), measure.concurrency)):
        requests = requests_from(prompts, first, measure)
        for player in rotated(blind, turn):
            runs[player.name].append(player.run(requests))
        # It has to know the answers, and so comes last.
        runs[PERFECT].append(generate(engines[PERFECT], told(requests, runs[PLAIN][-1])))
        advance(len(requests))
    return runs


def warm_up(engines: Mapping[str, Engine], prompt: Sequence[int], measure: Measure) -> None:
    """One short answer of engines that nobody measures: first calls allocate and choose code paths."""
    take_turns(engines, [prompt] * measure.concurrency, replace(measure, max_tokens=_WARM_UP_TOKENS))


def told(requests: Sequence[GenerationRequest], answered: Run) -> list[GenerationRequest]:
    """The same requests, each with its answer as prediction."""
    pairs = zip(requests, answered.answers, strict=True)
    return [replace(request, prediction=answer.token_ids) for request, answer in pairs]


def _drafters(limits: EngineLimits, seed: int, vocab_size: int, device: torch.device) -> dict[str, Drafter]:
    nodes, sequences, length = limits.max_budget, limits.max_sequences, limits.max_model_len
    return {
        RANDOM: RandomTreeDrafter(
            seed, vocab_size, nodes, hit_rate=0.0, max_sequences=sequences, max_length=length, device=device
        ),
        LIAR: ScriptedDrafter(LIAR, Lies(seed, vocab_size, nodes, device)),
        PERFECT: ScriptedDrafter(PERFECT, Replay(nodes, max_sequences=sequences, max_length=length, device=device)),
    }
