"""Evaluates a drafter on held-out sequences: losses, hit rates, and replayed drafting with blocks and with trees.
Nothing is generated: a replayed step accepts the proposed tokens that continue the sequence. Blocks are ranked with the
sequence's sampling noise if its seed is known; trees grow at temperature 0.
Legend: batch = sequences of a batch, nodes, depth as in drafters/tree.py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.coupling import TreeNoise
from drafters.memory.drafter import MemoryDrafter
from drafters.network.blocks import TrainedWeights
from drafters.network.checkpoint import weights_of
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.layers import Embed
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, Read
from drafters.training.corpus import Batch, Example, batches
from drafters.training.forward import forward_of
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.tree import MAX_DEPTH, DraftTree, VerifyResult
from kernels import ops

TREE_NODES = 16
_SEED = 1
_ANCHORED_ROWS = 2.1
_REPLAYED = 24
_REPLAYED_TOKENS = 64

_LEAST_POSITIONS = 4
"""Minimum length of the paths that are replayed without a tree, if the drafter is trained for as many positions."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """Number of replayed steps, and of the tokens that they emitted."""

    tokens: int = 0
    steps: int = 0

    @property
    def tau(self) -> float:
        """Emitted tokens per step."""
        return self.tokens / max(1, self.steps)


def replay_blocks(model: SpecBlock, embed: Embed, example: Example, *, every: int, nodes: int) -> Replayed:
    """Replay a step at each `every`-th position of the answer, with the `nodes` likeliest paths of a block."""
    return _emitted(accepted_of_blocks(model, embed, example, every, nodes))


def replay_memory(example: Example, *, every: int, nodes: int) -> Replayed:
    """Replay consecutive steps of the memory, whose trees copy from the sequence so far. (A mean over positions would
    count a long copy at each of its tokens.)"""
    return walked(_accepted_of_copies(example, every, nodes), every)


def replay_beside_memory(model: SpecBlock, embed: Embed, example: Example, *, every: int, nodes: int) -> Replayed:
    """Replay consecutive steps with blocks and the memory, of which the longer accepted path counts."""
    copied = _accepted_of_copies(example, every, nodes).to(model.d2t.device)
    return walked(torch.maximum(accepted_of_blocks(model, embed, example, every, nodes), copied), every)


def _emitted(accepted: Tensor) -> Replayed:
    """Count one step per anchor. # accepted [anchors]"""
    steps = accepted.shape[0]
    return Replayed(int(accepted.sum()) + steps, steps)


def walked(accepted: Tensor, every: int) -> Replayed:
    """Count the consecutive steps that these accepted lengths give. Between two anchors the earlier one applies.
    # accepted [anchors]"""
    lengths, place, steps = accepted.tolist(), 0, 0
    while place < every * len(lengths):
        place += lengths[place // every] + 1
        steps += 1
    return Replayed(place, steps)


def _anchors(example: Example, every: int) -> Tensor:
    return torch.arange(example.prompt - 1, example.length - 1, every)


@torch.no_grad()
def accepted_of_blocks(model: SpecBlock, embed: Embed, example: Example, every: int, nodes: int) -> Tensor:
    """Return the accepted length of the `nodes` likeliest paths of a block at each anchor, ranked with the sequence's
    sampling noise if its seed is known. # -> [anchors] int64"""
    anchors = _anchors(example, every).to(model.d2t.device)
    states, wanted = _along(model, embed, example, anchors, -(-_LEAST_POSITIONS // model.config.block_size))
    temperature = 0.0 if example.seed is None else example.temperature
    noise = Noise.of_text(example.seed or 0, temperature, example.start + anchors[:1] + 1)
    ahead = anchors[:, None] - anchors[0] + 1 + torch.arange(states.shape[1], device=anchors.device)
    length = int(anchors[-1] - anchors[0]) + states.shape[1]  # positions with noise; anchors share most of them
    scores = TreeNoise.of(noise, length, model.d2t).scores(model.lm_head(states)[None], ahead[None])[0]
    logprobs = scores.float().log_softmax(-1)  # [anchors, positions, draft vocab]
    ids = torch.where(wanted < 0, -1, model.t2d[wanted.clamp(min=0)])
    continuation = (
        logprobs.gather(2, ids.clamp(min=0)[:, :, None]).squeeze(2).masked_fill(ids < 0, float("-inf")).cumsum(1)
    )
    accepted: Tensor = (continuation > _border(logprobs, nodes)[:, None]).sum(1)
    return accepted


@torch.no_grad()
def _accepted_of_copies(example: Example, every: int, nodes: int) -> Tensor:
    """Return the accepted length of the memory's tree at each anchor, from the sequence up to there.
    # -> [anchors] int64"""
    anchors, tokens = _anchors(example, every), example.tokens.cpu()
    number = anchors.shape[0]
    sizes = DraftingSizes(max_sequences=number, max_length=example.length, max_nodes=nodes)
    drafter, rows = MemoryDrafter(sizes), torch.arange(number)
    drafter.start([DraftContext(row, tokens[: anchor + 2].tolist()) for row, anchor in enumerate(anchors.tolist())])
    zeros = torch.zeros_like(rows)
    tree = drafter.grow(rows, Noise(zeros, zeros.float(), anchors + 1, warm=False))
    ahead = anchors[:, None] + 2 + torch.arange(MAX_DEPTH + 1)
    inside = ahead < example.length
    continuation = tokens[ahead.clamp(max=example.length - 1)].masked_fill(~inside, -1)
    fates = ops.on(tokens.device).fates(tree.tokens, tree.parents, tree.depths, continuation, inside.sum(1))
    return fates.came_true.sum(1)


def _border(logprobs: Tensor, nodes: int) -> Tensor:
    """Return the log-probability of the likeliest path that is not among the first `nodes`.
    # logprobs [n, block, vocab] -> [n]"""
    kept = nodes + 1
    tops = logprobs.topk(min(kept, logprobs.shape[2]), dim=2).values
    paths = [tops[:, 0]]
    for top in tops.unbind(1)[1:]:
        longer = (paths[-1][:, :, None] + top[:, None]).flatten(1)
        paths.append(longer.topk(min(kept, longer.shape[1])).values)
    return torch.cat(paths, dim=1).topk(kept).values[:, -1]


def _along(model: SpecBlock, embed: Embed, example: Example, anchors: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Return states of so many consecutive blocks on the sequence itself, at most as many as the kind is trained for,
    and the tokens they should predict, -1 past the end. # anchors [n] -> [n, positions, hidden], [n, positions]"""
    config, forward = model.config, forward_of(model, embed)
    batch = Batch.of([example], config.reach, anchors.device)
    _, grown = forward.first(batch, anchors[None])
    states = [grown.states]
    for _ in range(1, min(blocks, config.trained_blocks)):
        grown = forward.next(batch, grown, torch.full_like(grown.anchors, config.block_size))
        states.append(grown.states)
    along = torch.cat(states, dim=2)[0]
    ahead = anchors[:, None] + 2 + torch.arange(along.shape[1], device=anchors.device)
    wanted = batch.tokens[0][ahead.clamp(max=example.length - 1)].masked_fill(ahead >= example.length, -1)
    return along, wanted


def serving(model: SpecBlock, embed: Embed) -> Callable[[DraftingSizes], Drafter]:
    """Return a factory of serving drafters with this model's weights."""
    network = ServingNetwork(model.config, weights_of(model))
    weights = TrainedWeights(network, embed, blocks=model.config.trained_blocks)
    return lambda sizes: SpecBlockDrafter(sizes, weights)


@torch.no_grad()
def replay_trees(
    make: Callable[[DraftingSizes], Drafter],
    examples: Sequence[Example],
    *,
    max_nodes: int,
    device: torch.device | str = "cpu",
) -> Replayed:
    """Replay a serving drafter on examples, with trees of at most `max_nodes` nodes, at temperature 0."""
    tokens = pad_sequence([e.tokens for e in examples], batch_first=True, padding_value=-1).to(device)
    features = pad_sequence([e.features for e in examples], batch_first=True).to(device)
    ends = torch.tensor([e.length for e in examples], device=device)
    batch, longest = tokens.shape
    slots = torch.arange(1, tokens.numel() + 1, device=device).view(batch, longest)  # slot 0 is for padding
    sizes = DraftingSizes(
        max_sequences=batch, max_length=longest, max_nodes=max_nodes, num_slots=slots.numel() + 1, device=device
    )
    drafter = make(sizes)
    drafter.start([DraftContext(row, e.tokens[: e.prompt].tolist()) for row, e in enumerate(examples)])
    roots = torch.tensor([e.prompt for e in examples], device=device) - 1
    rows = (roots + 2 < ends).nonzero()[:, 0]
    for row in rows.tolist():
        last = examples[row].prompt - 1
        drafter.read(Read(row, 0, tokens[row, 1 : last + 1], slots[row, :last], features[row, :last]))
    reach = torch.arange(min(max_nodes, MAX_DEPTH) + 1, device=device)
    tree, done = DraftTree.empty(len(rows), device), Replayed()  # the first token of a response is not drafted
    while len(rows):
        at = roots[rows]
        ahead = at[:, None] + 1 + reach
        inside = ahead < ends[rows, None]
        continuation = tokens[rows[:, None], ahead.clamp(max=longest - 1)].masked_fill(~inside, -1)
        # The last token of a sequence is not drafted.
        known = (inside.sum(1) - 1).clamp(min=0)
        fates = ops.on(tokens.device).fates(tree.tokens, tree.parents, tree.depths, continuation, known)
        accepted = fates.came_true.sum(1)
        places = (at[:, None] + reach).clamp(max=longest - 1)
        nothing = tokens.new_zeros(len(rows), 0)
        drafter.commit(
            Committed(
                rows=rows,
                tokens=continuation.masked_fill(reach > accepted[:, None], -1),
                counts=accepted + 1,
                tree=tree,
                result=VerifyResult(nothing, accepted, nothing),
                features=features[rows[:, None], places],
                positions=at,
                slots=slots[rows[:, None], places],
            )
        )
        if tree.width:
            done = Replayed(done.tokens + int(accepted.sum()) + len(rows), done.steps + len(rows))
        roots[rows] += accepted + 1
        rows = rows[roots[rows] + 1 < ends[rows]]
        zeros = torch.zeros_like(rows)
        if len(rows):
            tree = drafter.grow(rows, Noise(zeros, zeros.float(), roots[rows], warm=False))
    return done


@dataclass(frozen=True, slots=True)
class HeldOutScores:
    """Scores of a drafter on held-out sequences; tuples are by index on the path from the anchor, the next token
    first."""

    loss: float  # cross-entropy to the target
    rank_loss: float
    alpha: tuple[float | None, ...]  # share of entries whose likeliest token is the target's; None: no entries
    covered: tuple[float | None, ...]  # the same for the first four ranks
    seen: tuple[int, ...]  # number of entries
    tree_tau: float  # emitted tokens per step with best-first trees of 16 nodes
    total_variation: float | None = None  # distance to the target over its likeliest tokens; None: not measured


@torch.no_grad()
def examine(
    model: SpecBlock, embed: Embed, examples: Sequence[Example], *, batch_tokens: int, autocast: bool
) -> HeldOutScores:
    """Evaluate a drafter on held-out sequences."""
    device, reach = model.d2t.device, model.config.reach
    replayed = _to_replay(examples)
    objective = Objective(model, embed, ObjectiveSettings(anchored_rows=_ANCHORED_ROWS))
    drawn = torch.Generator().manual_seed(_SEED)
    losses, counts, groups = torch.zeros(3), torch.zeros(3, reach), 0
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
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
        tree_tau=tree.tau,
        total_variation=distance,
    )


def _to_replay(examples: Sequence[Example]) -> list[Example]:
    """Return the beginnings of a few sequences for `replay_trees`, greedy ones if there are any."""
    long_enough = [example for example in examples if example.length >= example.prompt + 2]
    greedy = [example for example in long_enough if example.temperature == 0.0]
    chosen = sorted(greedy or long_enough, key=lambda example: example.prompt_digest)[:_REPLAYED]
    return [example.first(min(example.length, example.prompt + _REPLAYED_TOKENS)) for example in chosen]


def _shares(part: Tensor, whole: Tensor) -> tuple[float | None, ...]:
    shares: list[float] = (part / whole).tolist()
    return tuple(None if math.isnan(share) else round(share, 4) for share in shares)
