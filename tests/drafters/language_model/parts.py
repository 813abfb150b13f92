"""Engines around tiny models whose drafters are language models, and what those proposed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.protocol import Noise
from drafters.tree import ROOT, Candidates
from service.drafter import draft_model_of, make_drafter
from service.engine.budget import FixedBudget
from service.engine.engine import Engine, EngineLimits
from service.engine.kv_pool import KVPool
from service.engine.target import Target
from tests.service.engine.harness import LIMITS, NUM_SLOTS, vocabulary_of
from tests.tiny_models import loaded_tiny

SEED = 5
"""Of a draft model that is not the target."""


def drafting_engine(
    name: str, *, limits: EngineLimits = LIMITS, num_slots: int = NUM_SLOTS, draft_seed: int = 0
) -> Engine:
    """A tiny Llama and the drafter of that name; with seed 0 a draft model is the target itself."""
    loaded, draft = loaded_tiny("llama"), loaded_tiny("llama", draft_seed)
    pool = KVPool(loaded.kv_shape, num_slots, loaded.model.device)
    target = Target(loaded.model, pool)
    model = draft_model_of(draft, loaded, name="draft", max_model_len=limits.max_model_len)
    drafter = make_drafter(name, target, limits, draft_model=model)
    drafter.timed = lambda times: None  # type: ignore[method-assign]  # without times nothing is found too dear
    return Engine(target, limits, vocabulary_of(loaded), drafter, FixedBudget(limits.max_budget))


class Proposed(NamedTuple):
    """What was proposed behind a text."""

    text: tuple[int, ...]
    chain: tuple[int, ...]  # from the root down, always the likeliest child


@dataclass
class Proposals:
    """Listens to a drafter."""

    seen: list[Proposed] = field(default_factory=list)

    @staticmethod
    def of(engine: Engine) -> "Proposals":
        """Of an engine's drafter, from now on."""
        proposals, drafter = Proposals(), engine.drafter
        grow: Callable[[Tensor, Noise], Candidates] = drafter.grow

        def listening(rows: Tensor, noise: Noise) -> Candidates:
            candidates = grow(rows, noise)
            running = {sequence.table_row: sequence for sequence in engine.scheduler.running}
            for line, row in enumerate(rows.tolist()):
                proposals.seen.append(Proposed(tuple(running[row].tokens), likeliest_chain(candidates, line)))
            return candidates

        drafter.grow = listening  # type: ignore[method-assign]
        return proposals


def likeliest_chain(candidates: Candidates, line: int) -> tuple[int, ...]:
    tokens, parents, _, survival = (values[line].tolist() for values in candidates[:4])
    count, chain, node = int(candidates.num_nodes[line]), list[int](), ROOT
    while children := [child for child in range(count) if parents[child] == node]:
        node = max(children, key=lambda child: survival[child])
        chain.append(tokens[node])
    return tuple(chain)


@torch.inference_mode()
def greedy_continuation(model: PreTrainedModel, text: Sequence[int], count: int) -> tuple[int, ...]:
    """What the model would say of its own."""
    tokens = list(text)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(text) :])
