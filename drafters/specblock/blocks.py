"""A draft tree block by block, as functions of tensors: beside their arguments they read and write only what stays
where it is, so that they can be called or captured. Knows neither how capturing works nor when a tree is large enough.

Legend: batch, rows = sequences of the engine's table, starts, block = K, rank = features.TOP, nodes (of one forward) =
starts * block * rank, live as in serving.py.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafters import merging
from drafters.protocol import Noise
from drafters.specblock.calibration import Calibration
from drafters.specblock.fates import Fates
from drafters.specblock.growth import Lattice, Origin, Picked
from drafters.specblock.heads import TreeNoise, propose
from drafters.specblock.model import Embed, SpecBlock
from drafters.specblock.policies import Policy
from drafters.specblock.pool import EntryPool, EntryState, Waiting
from drafters.specblock.recording import Recorder
from drafters.specblock.serving import BlockForward, LiveRows, Reach, Window
from drafters.tree import Candidates, DraftTree
from kernels.tree_attention import NULL_SLOT

NOWHERE = -1
_MIN_SURVIVAL = 0.02
"""Candidates less likely than this never pay: a node costs more than 1/50 of a step on any machine."""


class TreeShape(NamedTuple):
    """How large trees may grow."""

    max_nodes: int
    blocks: int = 2  # M, forwards per tree
    starts: int = 4  # blocks begun at once after the first forward


class Sizes(NamedTuple):
    """What the host knows of a batch of trees before they grow."""

    waiting: int  # most entries that wait for any of its sequences
    width: int  # positions that the attention window holds
    warm: bool  # whether any of its temperatures may be above 0


class Keys(NamedTuple):
    """Whose trees grow, and the keys of their sampling noise; all [batch]."""

    rows: Tensor  # int64
    seeds: Tensor  # int64
    temperatures: Tensor  # float32
    roots: Tensor  # int64, absolute positions


class Ground(NamedTuple):
    """What all blocks of a tree stand on."""

    anchored: Tensor  # [batch] bool; a text whose last token alone is still to be read has no anchor
    window: Window
    noise: TreeNoise


class Nodes(NamedTuple):
    """One forward's nodes, all [batch, nodes]; parents count across forwards."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    survival: Tensor
    predicted: Tensor  # conditional probabilities before correction


class Further(NamedTuple):
    """What blocks that start at a forward's nodes need of it."""

    picked: Picked
    states: Tensor  # [batch, starts, block, hidden]
    path: Tensor  # as of `Reach`
    limits: Tensor  # as of `Reach`
    live: tuple[Tensor, ...]  # as `LiveRows.tensors` gives them


class Block(NamedTuple):
    """What one forward adds to a tree."""

    nodes: Nodes
    further: tuple[Further, ...]  # none behind the last forward that a tree may have


class Blocks:
    """Grows blocks from committed entries, and makes one tree of them."""

    def __init__(
        self,
        model: SpecBlock,
        embed: Embed,
        *,
        pool: EntryPool,
        state: EntryState,
        calibration: Calibration,
        fates: Fates,
        recorder: Recorder,
        policy: Policy,
        shape: TreeShape,
    ) -> None:
        self.shape = shape
        self._model, self._embed = model, embed
        self._pool, self._state = pool, state
        self._calibration, self._fates = calibration, fates
        self._recorder = recorder
        self._policy = policy

    @property
    def device(self) -> torch.device:
        return self._model.d2t.device

    def ingest(self, rows: Tensor, waiting: Waiting, width: int) -> None:
        """Run entries without drafting."""
        self._pool.hold(waiting.slots)
        BlockForward(self._model, self._embed, self._pool, self._window(rows, width)).ingest(waiting)

    def begin(self, keys: Keys, sizes: Sizes) -> tuple[Ground, Block]:
        """Run what waits, and the block at the newest entry."""
        anchored = self._state.num_waiting(keys.rows) > 0
        waiting = self._state.take(keys.rows, sizes.waiting)
        self._pool.hold(waiting.slots)
        window = self._window(keys.rows, sizes.width)
        noise = Noise(keys.seeds, keys.temperatures, keys.roots, sizes.warm)
        config = self._model.config
        tree_noise = TreeNoise.of(noise, self.shape.blocks * config.block_size, self._model.d2t)
        ground = Ground(anchored, window, tree_noise)
        forward = BlockForward(self._model, self._embed, self._pool, window)
        states = forward.first(waiting)[:, None]  # [batch, 1, block, hidden]
        reach = Reach.of_first(waiting.positions[:, -1], self._pool.entries)
        root = Origin.root(keys.rows.shape[0], keys.rows.device)
        block, logprobs = self._block(states, root, reach, ground, [], forward.live)
        self._recorder.grown(keys.rows, keys.roots.where(anchored, NOWHERE), states[:, 0], logprobs[:, 0])
        return ground, block

    def follow(self, keys: Keys, ground: Ground, before: Sequence[Block]) -> Block:
        """Run the blocks that start at nodes of the last one."""
        picked, states, path, limits, live = before[-1].further[0]
        offset = self._pool.entries if len(before) == 1 else 0  # later blocks leave nothing in the pool
        reach = Reach(path, limits, offset).onward(picked, self._model.config.block_size)
        forward = BlockForward(self._model, self._embed, self._pool, ground.window, LiveRows.of(live))
        states = forward.next(states, picked, reach, keys.roots)
        return self._block(states, picked.origin, reach, ground, before, forward.live)[0]

    def tree(self, keys: Keys, ground: Ground, grown: Sequence[Block]) -> tuple[Tensor, ...]:
        """One tree of all blocks' nodes; keeps what is needed to learn from it. # -> the fields of `DraftTree`"""
        parts = zip(*(block.nodes for block in grown), strict=True)
        tokens, parents, depths, survival, predicted = (torch.cat(part, dim=1) for part in parts)
        likely = survival * ((survival >= _MIN_SURVIVAL) & ground.anchored[:, None])
        raw = DraftTree(tokens, parents, depths, likely, (likely > 0).sum(1))
        tree, chosen = merging.merge(raw, self.shape.max_nodes)
        buckets = torch.cat([self._buckets(number, block.nodes) for number, block in enumerate(grown)], dim=1)
        self._fates.keep(keys.rows, tree, predicted.gather(1, chosen), buckets.gather(1, chosen))
        return tree.tokens, tree.parents, tree.depths, tree.survival, tree.num_nodes

    def _block(
        self, states: Tensor, origin: Origin, reach: Reach, ground: Ground, before: Sequence[Block], live: LiveRows
    ) -> tuple[Block, Tensor]:
        """The nodes of one forward's blocks, and its log-probabilities. # states [batch, starts, block, hidden]"""
        number = len(before)
        ahead = torch.arange(states.shape[2], device=states.device)
        proposal = propose(self._model, states, origin.depth[..., None] + 1 + ahead, ground.noise)
        predicted = self._policy(proposal.odds)
        corrected = self._calibration.correct(predicted, number)
        first_number = sum(block.nodes.tokens.shape[1] for block in before)
        lattice = Lattice(origin, proposal.tokens, corrected, first_number)
        raw = lattice.candidates()
        nodes = Nodes(raw.tokens, raw.parents, raw.depths, raw.survival, predicted.flatten(1))
        if number + 1 == self.shape.blocks:
            return Block(nodes, ()), proposal.logprobs
        picked = lattice.pick(self.shape.starts)
        further = Further(picked, states, reach.path, reach.limits, tuple(live.tensors()))
        return Block(nodes, (further,)), proposal.logprobs

    def _buckets(self, number: int, nodes: Nodes) -> Tensor:
        """Calibration buckets of a block's nodes. # -> [batch, nodes] int64"""
        buckets = self._calibration.buckets(number).flatten()
        batch, width = nodes.tokens.shape
        return buckets.repeat(width // buckets.shape[0]).expand(batch, -1)

    def _window(self, rows: Tensor, width: int) -> Window:
        """Entries at the newest positions, of those that can be read by now."""
        positions, slots = self._state.window(rows, width)
        readable = self._pool.holds(slots)
        return Window.of(positions.where(readable, NOWHERE), slots.where(readable, NULL_SLOT), self._pool)


class Growing(Protocol):
    """A batch of trees while they grow."""

    @property
    def promise(self) -> Tensor:
        """Survival of the nodes where the next blocks would start. # [batch, starts]"""
        ...

    def grow(self) -> None:
        """One block further."""
        ...

    def candidates(self) -> Candidates:
        """The trees, which those that grow next may overwrite."""
        ...


class AsItIs:
    """Trees whose kernels are launched one by one."""

    def __init__(self, blocks: Blocks, keys: Keys, sizes: Sizes) -> None:
        self._blocks, self._keys = blocks, keys
        self._ground, first = blocks.begin(keys, sizes)
        self._grown = [first]

    @property
    def promise(self) -> Tensor:
        return self._grown[-1].further[0].picked.origin.survival

    def grow(self) -> None:
        self._grown.append(self._blocks.follow(self._keys, self._ground, self._grown))

    def candidates(self) -> Candidates:
        return DraftTree(*self._blocks.tree(self._keys, self._ground, self._grown))
