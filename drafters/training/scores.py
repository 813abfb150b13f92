"""Scores on held-out sequences, with a fixed seed: losses, hits by index on the path, replayed tau."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.network.layers import Embed
from drafters.network.model import SpecBlock
from drafters.training.corpus import Batch, Example, batches
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.replay import Replayed, replay_chain, replay_trees, serving

TREE_NODES = 16
_SEED = 1
_ANCHORED_ROWS = 2.1
_REPLAYED = 24
_REPLAYED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """Scores of a drafter; tuples are by index on the path from the anchor, the next token first."""

    loss: float  # cross-entropy to the target
    rank_loss: float
    alpha: tuple[float | None, ...]  # share of entries whose likeliest token is the target's; None: none reached
    covered: tuple[float | None, ...]  # the same for the first four ranks
    seen: tuple[int, ...]  # entries counted
    chain_tau: float
    tree_tau: float  # best-first trees of 16 nodes
    total_variation: float | None = None  # to the target, by its likeliest tokens; None: not measured


@torch.no_grad()
def examine(
    model: SpecBlock, embed: Embed, examples: Sequence[Example], *, batch_tokens: int, autocast: bool
) -> HeldOutScores:
    """Score a drafter on sequences that it is not trained on."""
    device, reach = model.d2t.device, model.config.reach
    replayed = _to_replay(examples)
    objective = Objective(model, embed, ObjectiveSettings(anchored_rows=_ANCHORED_ROWS))
    drawn = torch.Generator().manual_seed(_SEED)
    losses, counts, groups = torch.zeros(3), torch.zeros(3, reach), 0
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        chain = sum((replay_chain(model, embed, example) for example in replayed), Replayed())
        for group in batches(list(examples), tokens=batch_tokens, generator=drawn):
            scores = objective(Batch.of(group, reach, device), drawn)
            losses += torch.stack([scores.draft_loss, scores.rank_loss, scores.distance]).float().cpu()
            counts += torch.stack([scores.hits, scores.covered, scores.seen])
            groups += 1
        tree = replay_trees(serving(model, embed), replayed, max_nodes=TREE_NODES, device=model.d2t.device)
    hits, covered, seen = counts
    loss, rank_loss, distance = (losses / max(1, groups)).tolist()
    return HeldOutScores(
        loss=loss,
        rank_loss=rank_loss,
        alpha=_shares(hits, seen),
        covered=_shares(covered, seen),
        seen=tuple(seen.int().tolist()),
        chain_tau=chain.tau,
        tree_tau=tree.tau,
        total_variation=distance,
    )


def _to_replay(examples: Sequence[Example]) -> list[Example]:
    """Return the beginnings of a few sequences, of temperature 0 if there are any."""
    long_enough = [example for example in examples if example.length >= example.prompt + 2]
    greedy = [example for example in long_enough if example.temperature == 0.0]
    chosen = sorted(greedy or long_enough, key=lambda example: example.prompt_digest)[:_REPLAYED]
    return [example.first(min(example.length, example.prompt + _REPLAYED_TOKENS)) for example in chosen]


def _shares(part: Tensor, whole: Tensor) -> tuple[float | None, ...]:
    shares: list[float] = (part / whole).tolist()
    return tuple(None if math.isnan(share) else round(share, 4) for share in shares)
