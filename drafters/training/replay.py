"""Evaluates a drafter on held-out sequences: losses, hit rates, and replayed drafting, as it is served or alone.
Nothing is generated: a replayed step accepts the proposed tokens that continue the sequence. Recorded answers are
replayed with their sampling noise, if its seed is known, and with the memory's record; others at temperature 0.
Legend: batch = sequences of a batch, roots = positions of an answer, nodes, depth as in drafters/tree.py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafters.coupling import TreeNoise
from drafters.feedback import USUAL_NODES
from drafters.memory.drafter import LEARNING_RATE, MAX_ANSWER_TOKENS, text_buckets
from drafters.network.blocks import TrainedWeights, path_nodes
from drafters.network.checkpoint import weights_of
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.heads import propose
from drafters.network.layers import Embed
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.protocol import MIN_SURVIVAL, Committed, DraftContext, Drafter, DraftingSizes, Noise, Read
from drafters.training.corpus import Batch, Example, RecordedMemory, batches
from drafters.training.forward import forward_of
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.tree import MAX_DEPTH, DraftTree, VerifyResult
from kernels import ops
from kernels.lattice import TOP, StartNodes
from kernels.memory import TEXT, Memory, bucket_hashes

TREE_NODES = 16
_SEED = 1
_ANCHORED_ROWS = 2.1
_REPLAYED = 24
_REPLAYED_TOKENS = 64

_OWN_BUCKETS, _PAST_BUCKETS = text_buckets(MAX_ANSWER_TOKENS), 1 << 16
_PROPOSED = 32  # nodes of a network's tree from which a tree of fewer nodes is grown
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


@torch.no_grad()
def replay_served(model: SpecBlock | None, embed: Embed, example: Example) -> Replayed:
    """Replay the steps that the engine would take through an answer, one behind the other: in each, the network's
    proposals (those of `model`; None: no network) and the memory, rebuilt from its record, grow one tree of as many
    nodes as the answer's drafts had, and the memory learns from the step. Not replayed: the corrections of the
    network's chances, choices after rejected nodes, and past answers after tokens that the answer does not contain.
    Without a record of a memory, one step at each position is replayed with the network's own tree of USUAL_NODES."""
    last, recorded = example.length - 1, example.memory
    if recorded is None:
        steps = last + 1 - example.prompt
        accepted = 0 if model is None else _accepted_alone(_proposals(model, embed, example, USUAL_NODES), example)
        return Replayed(accepted + steps, steps)
    trees = None if model is None else _proposals(model, embed, example, max(_PROPOSED, recorded.nodes))
    memory, root, steps = _RebuiltMemory(example, recorded, trees), example.prompt, 0
    memory.commit(example.prompt - 1, 1)  # the first token of an answer is not drafted
    while root < last:
        count = memory.accepted(root, recorded.nodes) + 1
        memory.commit(root, count)
        root, steps = root + count, steps + 1
    return Replayed(last - example.prompt, steps)


class _RebuiltMemory:
    """The memory as it drafted for an answer, in tables of its own on the CPU."""

    def __init__(self, example: Example, recorded: RecordedMemory, trees: DraftTree | None) -> None:
        """`trees`: the network's proposals for each root of the answer [roots, nodes]; None: no network."""
        self.tokens, self._example = example.tokens.cpu(), example
        self._trees = None if trees is None else trees.to(torch.device("cpu"))
        self._rows = torch.tensor([0])
        self._ops = ops.on(self._rows.device)
        width = _PROPOSED if trees is None else trees.width
        self._memory = memory = Memory.empty(1, _OWN_BUCKETS + _PAST_BUCKETS, 1, width)
        memory.parts[0] = torch.tensor([[0, _OWN_BUCKETS], [0, 0], [_OWN_BUCKETS, _PAST_BUCKETS]])
        memory.weights[0], memory.squares[0] = recorded.regression.cpu()
        if example.seed is not None:
            memory.seeds[0], memory.warm[0] = example.seed, example.temperature > 0
        prompt = torch.cat([recorded.before.cpu(), self.tokens[: example.prompt]])
        self._ops.add_text(memory, 0, TEXT, prompt)
        hashes = bucket_hashes(memory.tails, self.tokens[None, example.prompt :])
        places = _OWN_BUCKETS + (hashes.flatten() & (_PAST_BUCKETS - 1))
        # The first record of a bucket counts: later ones hold what this answer has added, which `commit` adds again.
        used, number = places.unique(return_inverse=True)
        first = torch.full_like(used, len(places)).scatter_reduce_(0, number, torch.arange(len(places)), "amin")
        memory.entries[used] = recorded.lines.cpu().flatten(0, 1)[first]

    def grow(self, root: int, nodes: int) -> DraftTree:
        """Grow the tree of `nodes` nodes after the token at index `root`. # -> [1, nodes]"""
        self._memory.roots[0] = self._example.start + root
        proposed = self._trees and self._trees.take(torch.tensor([root - self._example.prompt]))
        return self._ops.grow_joint_tree(self._memory, self._rows, proposed, nodes, MIN_SURVIVAL)

    def accepted(self, root: int, nodes: int) -> int:
        """Grow a tree and return how many of its nodes are accepted; the last token of an answer is never drafted."""
        ahead = self.tokens[None, root + 1 : -1][:, :MAX_DEPTH]
        if not ahead.shape[1]:
            return 0
        tree = self.grow(root, nodes)
        fates = self._ops.fates(tree.tokens, tree.parents, tree.depths, ahead, torch.tensor([ahead.shape[1]]))
        return int(fates.came_true.sum())

    def commit(self, root: int, count: int) -> None:
        """Learn from the `count` tokens after `root`."""
        self._memory.roots[0] = self._example.start + root
        tokens, counts = self.tokens[None, root + 1 : root + 1 + count], torch.tensor([count])
        nothing = DraftTree.empty(1), torch.zeros(1, 1, dtype=torch.int64)
        self._ops.learn_committed(self._memory, self._rows, tokens, counts, *nothing, LEARNING_RATE)


def _accepted_alone(trees: DraftTree, example: Example) -> int:
    """Return the accepted nodes of one tree for each root of an answer. # trees [roots, nodes]"""
    device = trees.tokens.device
    roots = torch.arange(example.prompt, example.length, device=device)
    ahead = roots[:, None] + 1 + torch.arange(MAX_DEPTH, device=device)
    tokens = example.tokens.to(device)[ahead.clamp(max=example.length - 1)]
    known = example.length - 1 - roots
    fates = ops.on(device).fates(trees.tokens, trees.parents, trees.depths, tokens, known)
    return int(fates.came_true.sum())


def _proposals(model: SpecBlock, embed: Embed, example: Example, nodes: int) -> DraftTree:
    """Return the trees that a network proposes for each root of an answer, ranked with the answer's sampling noise if
    its seed is known. Further blocks start where the answer goes on. # -> [length - prompt, nodes]"""
    anchors = torch.arange(example.prompt - 1, example.length - 1, device=model.d2t.device)
    size, paths = model.config.block_size, model.traits.paths
    states, wanted = _along(model, embed, example, anchors, 1 if paths > 1 else -(-_LEAST_POSITIONS // size))
    temperature = 0.0 if example.seed is None else example.temperature
    noise = Noise.of_text(example.seed or 0, temperature, example.start + anchors[:1] + 1)
    ahead = anchors[:, None] - anchors[0] + 1 + torch.arange(states.shape[1], device=anchors.device)
    length = len(anchors) + states.shape[1]  # positions with noise; anchors share most of them
    proposal = propose(model, states[None], ahead[None], TreeNoise.of(noise, length, model.d2t))
    tokens, chances = proposal.tokens[0][:, None], proposal.predicted[0][:, None]  # [roots, 1, positions, rank]
    trust, origin = torch.ones_like(chances[0, 0, :size]), StartNodes.root(len(anchors), anchors.device)
    blocks = []
    for start in range(0, states.shape[1], size):
        end = start + size
        offered = origin, tokens[:, :, start:end], chances[:, :, start:end], trust
        lattice, _ = ops.on(anchors.device).grow_lattice(*offered, start * TOP, MIN_SURVIVAL, 0)
        blocks.append(lattice.nodes() if paths == 1 else path_nodes(*offered, MIN_SURVIVAL, paths=paths))
        found = tokens[:, 0, end - 1] == wanted[:, end - 1 : end]  # [roots, rank]
        on_path = (tokens[:, 0, start : end - 1, 0] == wanted[:, start : end - 1]).all(1) & found.any(1)
        rank = found.long().argmax(1)[:, None]
        survival = lattice.survival.gather(1, (size - 1) * TOP + rank) * on_path[:, None]
        origin = StartNodes((end - 1) * TOP + rank, torch.full_like(rank, end), survival)
    tokens, parents, depths, survival = (torch.cat(part, dim=1) for part in zip(*blocks, strict=True))
    raw = DraftTree(tokens, parents, depths, survival, num_nodes=anchors)  # of a raw tree it is not read
    return ops.on(anchors.device).likeliest_nodes(raw, nodes)[0]


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
