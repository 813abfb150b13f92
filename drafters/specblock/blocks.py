"""A draft tree block by block, as functions of tensors: beside their arguments they read and write only what stays
where it is, so that they can be called or captured. Legend: batch, rows = sequences of the engine's table, starts,
block = K, rank = features.TOP, nodes (of one forward) = starts * block * rank, live as in serving.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from drafters.calibration import MIN_SURVIVAL
from drafters.coupling import TreeNoise
from drafters.lattice import Chain
from drafters.protocol import DraftingSizes, Noise
from drafters.ranks import RankCalibration
from drafters.slots import taken_slots
from drafters.specblock.forwards import Live, forward_of
from drafters.specblock.growth import POLICIES
from drafters.specblock.heads import propose
from drafters.specblock.model import Embed
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import WAITING, EntryPool, EntryState, Waiting
from drafters.specblock.recording import BlockRecorder
from drafters.tree import DraftTree
from kernels.graph_runner import GraphRunner, by_batch
from kernels.lattice import Picked, StartNodes

NOWHERE = -1
COUNTS = (4, 16, WAITING)
"""Waiting entries that are captured."""


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A trained drafter network, the target's embedding it reads tokens with, and how its trees grow."""

    network: ServingNetwork
    embed: Embed
    blocks: int = 2  # M, forwards per tree
    starts: int = 4  # blocks begun at once after the first forward
    policy: str = "best_first"  # of POLICIES
    recorder: BlockRecorder | None = None  # of what may be learnt
    version: Callable[[], int] = lambda: 0  # of the weights that `network` holds now
    ready: Callable[[], bool] = lambda: True  # whether they have anything to say


class Sizes(NamedTuple):
    """What the host knows of a batch of trees before they grow."""

    waiting: int  # most entries that wait for any of its sequences
    warm: bool  # whether any of its temperatures may be above 0


class Keys(NamedTuple):
    """Whose trees grow, and the keys of their sampling noise; all [batch]."""

    rows: Tensor  # int64
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
    roots: Tensor  # int64, absolute positions


class Ground(NamedTuple):
    """What all blocks of a tree stand on."""

    keys: Keys
    noise: TreeNoise


class Nodes(NamedTuple):
    """One forward's nodes, [batch, nodes]; parents count across forwards."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    survival: Tensor
    predicted: Tensor  # conditional probabilities before correction
    buckets: Tensor  # [nodes] int64, of the calibration


class Further(NamedTuple):
    """What blocks that start at a forward's nodes need of it."""

    picked: Picked
    states: Tensor  # [batch, starts, block, hidden]
    live: Live


class Block(NamedTuple):
    """What one forward adds to a tree."""

    nodes: Nodes
    further: tuple[Further, ...]  # none behind the last forward that a tree may have


class Blocks:
    """Grows blocks from committed entries, makes one tree of them, and learns what became of it: `begin`, `follow` (one
    for each further block), `tree`, `take_in` and `pass_by` are runners of the functions below, eager or captured in a
    few shapes, whose batches are padded with rows of nobody's and whose waiting entries with what nobody sees."""

    def __init__(self, sizes: DraftingSizes, weights: TrainedWeights) -> None:
        self._weights, self._network = weights, weights.network
        config = weights.network.config
        self._policy = POLICIES[weights.policy]
        self._max_nodes = sizes.max_nodes
        self._ops = weights.network.ops
        live = config.live(weights.blocks, weights.starts)
        self._witness = sizes.witness
        self.pool = EntryPool(weights.network, sizes.num_slots, lines=sizes.max_sequences, live=live)
        width = len(config.tap_layers) * config.hidden_size
        self.state = EntryState(sizes, self.pool, width, weights.network.dtype)
        self._forward = forward_of(weights.network, weights.embed, self.pool, self.state)
        self.calibration = RankCalibration(config.block_size, sizes)
        capture, most = sizes.capture, sizes.max_sequences
        padding = self.state.padding(most)
        self.take_in = by_batch(self._take_in, capture, most, padding)
        nobody, _, counts, slots, _, tokens = padding
        passing = (nobody, counts, slots, tokens)
        self.pass_by = by_batch(self._pass_by, capture, most, passing)
        none = torch.zeros_like(nobody)
        keys = Keys(nobody, none, none.float(), none)
        begun = [(keys, Sizes(count, warm)) for warm, count in product((True, False), reversed(COUNTS))]
        self.begin = by_batch(self._begin, capture, most, *begun)
        # How many entries wait changes nothing in the shapes of what follows.
        grown: list[tuple[Ground, tuple[Block, ...]]] = [
            (ground, (first,)) for ground, first in self.begin.results[:: len(COUNTS)]
        ]
        self.follow: list[GraphRunner[Block]] = []
        for _ in range(1, weights.blocks):
            runner = GraphRunner(self._follow, capture, (((), given) for given in grown))
            self.follow.append(runner)
            grown = [(ground, (*blocks, last)) for (ground, blocks), last in zip(grown, runner.results, strict=True)]
        of_batches = grown[::2]  # a tree does not depend on warmth
        numbers = range(weights.blocks, 0, -1)
        trees = (((), of_tree(ground, blocks[:number])) for number, (ground, blocks) in product(numbers, of_batches))
        self.tree = GraphRunner(self._tree, capture, trees)

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Run entries without drafting."""
        self._forward.ingest(rows, waiting)

    def _begin(self, keys: Keys, sizes: Sizes) -> tuple[Ground, Block]:
        """Run what waits, and the block at the newest entry."""
        waiting = self.state.take(keys.rows, sizes.waiting)
        anchored = waiting.positions[:, -1] >= 0  # not a text whose last token alone is still to be read
        noise = Noise(keys.seeds, keys.temperatures, keys.roots, sizes.warm)
        depth = self._weights.blocks * self._network.config.block_size
        ground = Ground(keys, TreeNoise.of(noise, depth, self._network.d2t))
        states, live = self._forward.first(keys.rows, waiting)  # [batch, 1, block, hidden]
        root = StartNodes.root(keys.rows.shape[0], keys.rows.device)
        root = root._replace(survival=root.survival * anchored[:, None])
        block, logits = self._block(states, live, root, ground, [])
        if self._weights.recorder is not None:
            roots = keys.roots.where(anchored, NOWHERE)
            self._weights.recorder.grown(keys.rows, roots, self._read(states)[:, 0], logits[:, 0])
        return ground, block

    def _follow(self, ground: Ground, before: Sequence[Block]) -> Block:
        """Run the blocks that start at nodes of the last one."""
        picked, states, live = before[-1].further[0]
        states, live = self._forward.next(states, picked, live, ground.keys.roots)
        return self._block(states, live, picked.origin, ground, before)[0]

    def _tree(self, rows: Tensor, grown: Sequence[Nodes]) -> DraftTree:
        """One tree of all blocks' nodes; keeps what is needed to learn from it."""
        tokens, parents, depths, survival, predicted, buckets = grown[0]
        if len(grown) > 1:
            values = (torch.cat(part, dim=-1) for part in zip(*grown, strict=True))
            tokens, parents, depths, survival, predicted, buckets = values
        merge = self._ops.merge_trees if len(grown) > 1 else self._ops.likeliest_nodes  # of one block all paths differ
        raw = DraftTree(tokens, parents, depths, survival, num_nodes=rows)  # of a raw tree it is not read
        tree, chosen = merge(raw, self._max_nodes)
        self.calibration.keep(rows, tree, chosen, predicted, buckets)
        return tree

    def _take_in(
        self, rows: Tensor, positions: Tensor, counts: Tensor, slots: Tensor, features: Tensor, tokens: Tensor
    ) -> Tensor:
        """Learn from what was committed, and let it wait for the next forward; arguments as of `EntryState.wait`.
        # -> [2] as of `learn`"""
        self.state.wait(rows, positions, counts, slots, features, tokens)
        return self.calibration.learn(rows, tokens, counts)

    def _pass_by(self, rows: Tensor, counts: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
        """The same of what no block will see. # -> [2] as of `learn`"""
        self.pool.forget(taken_slots(slots, counts))
        return self.calibration.learn(rows, tokens, counts)

    def _block(
        self, states: Tensor, live: Live, origin: StartNodes, ground: Ground, before: Sequence[Block]
    ) -> tuple[Block, Tensor]:
        """The nodes of one forward's blocks, and its logits. # states [batch, starts, block, hidden]"""
        number = len(before)
        ahead = torch.arange(states.shape[2], device=states.device)
        proposal = propose(self._network, self._read(states), origin.depth[..., None] + 1 + ahead, ground.noise)
        predicted = self._policy(proposal.chances)
        is_last, paths = number + 1 == self._weights.blocks, self._network.config.traits.paths
        first_number = sum(block.nodes.tokens.shape[1] for block in before)
        offered = origin, proposal.tokens, predicted, self.calibration.trust(number)
        starts = 0 if is_last else self._weights.starts
        lattice, picked = self._ops.grow_lattice(*offered, first_number, MIN_SURVIVAL, starts)
        self._witness(lattice, proposal.logits, self._network.d2t)
        buckets = self.calibration.buckets(number).flatten()
        if paths > 1:
            grown = Chain(*offered, MIN_SURVIVAL, paths=paths).nodes()
            nodes = Nodes(*grown, predicted.expand(-1, paths, -1, -1).flatten(1), buckets.repeat(paths))
            return Block(nodes, ()), proposal.logits
        nodes = Nodes(*lattice.nodes(), predicted.flatten(1), buckets.repeat(states.shape[1]))
        return Block(nodes, () if is_last else (Further(picked, states, live),)), proposal.logits

    def _read(self, states: Tensor) -> Tensor:
        """What the heads read of them. # [..., hidden and more] -> [..., hidden]"""
        return states[..., : self._network.config.hidden_size].contiguous()


def of_tree(ground: Ground, grown: Sequence[Block]) -> tuple[Tensor, tuple[Nodes, ...]]:
    """What `Blocks.tree` asks for."""
    return ground.keys.rows, tuple(block.nodes for block in grown)
