"""The SpecBlock drafter behind the drafter protocol: entries in, draft trees out, calibration by what came true.

Legend: batch, rows = sequences of the engine's table, starts, block = K, rank = features.TOP, nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafters import merging
from drafters.protocol import Committed, DraftContext, Noise, RankOutcomes, Read
from drafters.specblock.calibration import Calibration
from drafters.specblock.captured import Capture, CapturedForwards
from drafters.specblock.growth import Lattice, Origin
from drafters.specblock.heads import TreeNoise, propose
from drafters.specblock.model import SpecBlock
from drafters.specblock.policies import Policy
from drafters.specblock.pool import WAITING, EntryPool, EntryState, Waiting
from drafters.specblock.recording import NoRecorder, Recorder
from drafters.specblock.serving import BlockForward, Reach, TreeForward, Window
from drafters.specblock.stopping import Stopping
from drafters.tree import ROOT, Candidates, DraftTree
from kernels.tree_attention import NULL_SLOT

_NOWHERE = -1
_WINDOW_STEP = 64  # widths of the attention window, so that few shapes occur
_MIN_SURVIVAL = 0.02
"""Candidates less likely than this never pay: a node costs more than 1/50 of a step on any machine."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How large trees may grow."""

    max_nodes: int
    blocks: int = 2  # M, forwards per tree
    starts: int = 4  # blocks begun at once after the first forward


@dataclass(frozen=True, slots=True)
class _Grown:
    """One forward's nodes and what they will teach."""

    lattice: Lattice
    foretold: Tensor  # [batch, starts, block, rank], conditional probabilities before correction
    buckets: Tensor  # [batch, starts, block, rank] int64
    logprobs: Tensor  # [batch, starts, block, draft_vocab]


class SpecBlockDrafter:
    """Drafts blocks of dependent positions from the target's own features."""

    name = "specblock"
    num_blocks = 0

    def __init__(
        self,
        model: SpecBlock,
        embed: Callable[[Tensor], Tensor],
        *,
        shape: TreeShape,
        policy: Policy,
        num_slots: int,
        max_sequences: int,
        max_length: int,
        device: torch.device | str,
        recorder: Recorder | None = None,
        version: Callable[[], int] = lambda: 0,
        capture: Capture | None = None,
    ) -> None:
        """`version` says which weights `model` holds now; `recorder` hears what may be learnt; with `capture` forwards
        are replayed."""
        config = model.config
        self.tap_layers = config.tap_layers
        self._recorder: Recorder = recorder or NoRecorder()
        self._version = version
        self._model = model
        self._embed = embed
        self._shape = shape
        self._policy = policy
        self._window = config.trained_length
        self._pool = _entry_pool(model, num_slots, device)
        self._forwards = self._as_it_is if capture is None else self._captured(capture, max_sequences)
        self._state = EntryState(
            max_sequences=max_sequences,
            max_length=max_length,
            width=len(config.tap_layers) * config.hidden_size,
            dtype=model.dtype,
            device=device,
        )
        self._calibration = Calibration(config.block_size, device=device)
        self._stopping = Stopping()
        self._useful_from = [0] * max_sequences
        nodes = (max_sequences, shape.max_nodes)
        self._hashes = torch.full(nodes, merging.NO_HASH, dtype=torch.int64, device=device)
        self._parents = torch.full_like(self._hashes, ROOT)
        self._buckets = torch.zeros_like(self._hashes)
        self._depths = torch.zeros_like(self._hashes)
        self._foretold = torch.zeros(nodes, device=device)

    @property
    def version(self) -> int:
        return self._version()

    @property
    def target_top(self) -> int:
        return self._recorder.target_top

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._recorder.start(contexts)
        rows = [context.row for context in contexts]
        self._state.start(rows)
        for context in contexts:
            self._useful_from[context.row] = len(context.tokens) - self._window
            if context.cached is not None:
                self._state.adopt(context.row, context.cached)
        self._hashes[rows] = merging.NO_HASH

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Run the entries of prompt positions that later blocks can see; those that are not run are never seen."""
        self._recorder.read(read)
        self._pool.forget(read.slots)
        if not read.worth_running:
            return
        kept = slice(max(0, self._useful_from[read.row] - read.start), None)
        positions = read.start + torch.arange(read.tokens.shape[0], device=read.tokens.device)[kept]
        if not positions.shape[0]:
            return
        rows = torch.tensor([read.row], device=positions.device)
        counts = torch.full_like(rows, positions.shape[0])
        self._make_room(rows, torch.full_like(counts, WAITING))
        self._state.append(rows, positions[:1], counts, read.slots[None, kept])
        waiting = Waiting(read.features[None, kept], read.tokens[None, kept], positions[None], read.slots[None, kept])
        self._forward(rows, waiting).ingest(waiting)

    @torch.inference_mode()
    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._stopping.begin(rows.shape[0])
        anchored = self._state.num_waiting(rows) > 0  # a text whose last token alone is still to be read has no anchor
        waiting = self._state.take(rows)
        forward = self._forward(rows, waiting)
        block_size = self._model.config.block_size
        perturbation = TreeNoise(noise, self._shape.blocks * block_size, self._model.d2t)
        states = forward.first(waiting)[:, None]  # [batch, 1, block, hidden]
        reach = Reach.of_first(waiting.positions[:, -1], self._pool.entries)
        grown = [self._grow_block(states, Origin.root(rows.shape[0], rows.device), perturbation, [])]
        self._recorder.grown(rows, noise.positions.where(anchored, _NOWHERE), states[:, 0], grown[0].logprobs[:, 0])
        for _ in range(1, self._shape.blocks):
            picked = grown[-1].lattice.pick(self._shape.starts)
            if not self._stopping.further(float(picked.origin.survival.sum())):  # planned transfer
                break
            reach = reach.onward(picked, block_size)
            states = forward.next(states, picked, reach, noise.positions)
            grown.append(self._grow_block(states, picked.origin, perturbation, grown))
            self._stopping.drafted()
        return self._merged(rows, grown, anchored)

    def commit(self, committed: Committed) -> None:
        assert committed.features is not None, "the target taps no features for this drafter"
        self._recorder.commit(committed)
        self._learn(committed)
        if not committed.worth_running:
            self._pool.forget(committed.slots[_taken(committed)])
            return
        self._make_room(committed.rows, committed.counts)
        taken = self._state.append(committed.rows, committed.positions, committed.counts, committed.slots)
        self._pool.forget(taken)
        self._state.wait(committed.rows, committed.counts, committed.features, committed.tokens)

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._hashes[list(rows)] = merging.NO_HASH
        return [0] * len(rows)

    def credits(self) -> Mapping[str, int]:
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        return self._calibration.outcomes()

    def trainable(self) -> nn.Module | None:
        return self._model

    def _grow_block(self, states: Tensor, origin: Origin, noise: TreeNoise, before: list[_Grown]) -> _Grown:
        """The nodes of one forward's blocks. # states [batch, starts, block, hidden]"""
        self.num_blocks += states.shape[0] * states.shape[1]
        block = torch.arange(states.shape[2], device=states.device)
        proposal = propose(self._model, states, origin.depth[..., None] + 1 + block, noise)
        foretold = self._policy(proposal.odds)
        corrected = self._calibration.correct(foretold, len(before))
        first_number = sum(part.lattice.num_nodes for part in before)
        buckets = self._calibration.buckets(len(before)).expand(foretold.shape)
        lattice = Lattice(origin, proposal.tokens, corrected, first_number)
        return _Grown(lattice, foretold, buckets, proposal.logprobs)

    def _merged(self, rows: Tensor, grown: list[_Grown], anchored: Tensor) -> Candidates:
        """One tree of all blocks' nodes; keeps what is needed to learn from it. # anchored [batch] bool"""
        raw = _side_by_side([part.lattice.candidates() for part in grown])
        likely = replace(raw, survival=raw.survival * ((raw.survival >= _MIN_SURVIVAL) & anchored[:, None]))
        tree, chosen = merging.merge(likely, self._shape.max_nodes)
        width = slice(tree.width)
        self._hashes[rows, width] = merging.node_hashes(tree)
        self._parents[rows, width] = tree.parents
        self._depths[rows, width] = tree.depths
        self._foretold[rows, width] = torch.cat([p.foretold.flatten(1) for p in grown], 1).gather(1, chosen)
        self._buckets[rows, width] = torch.cat([p.buckets.flatten(1) for p in grown], 1).gather(1, chosen)
        return tree

    def _learn(self, committed: Committed) -> None:
        rows = committed.rows
        hashes, parents = self._hashes[rows], self._parents[rows]
        true = merging.came_true(hashes, committed.tokens, committed.counts)
        tried = torch.where(parents < 0, True, true.gather(1, parents.clamp(min=0))) & (hashes != merging.NO_HASH)
        self._calibration.observe(self._buckets[rows], self._foretold[rows], true, tried)
        if self._shape.blocks > 1:
            self._settle(committed, true & tried)
        self._hashes[rows] = merging.NO_HASH

    def _settle(self, committed: Committed, true: Tensor) -> None:
        """Tell the stopping rule what further blocks brought. # true [batch, nodes]"""
        rows, accepted = committed.rows, committed.counts[:, None] - 1
        further = self._buckets[rows] >= self._calibration.first_further
        came = (true & further & (self._depths[rows] <= accepted)).sum()
        self._stopping.settle(int(came), int(committed.counts.sum()))  # planned transfer

    def _make_room(self, rows: Tensor, counts: Tensor) -> None:
        """Run what waits where the next entries would not fit beside it: nobody drafted for a while."""
        full = self._state.num_waiting(rows) + counts > WAITING
        if bool(full.any()):  # planned transfer
            crowded = rows[full]
            waiting = self._state.take(crowded)
            self._forward(crowded, waiting).ingest(waiting)

    def _forward(self, rows: Tensor, waiting: Waiting) -> TreeForward:
        """A forward that will run these entries and can read all that are known by then."""
        self._pool.hold(waiting.slots)
        known = min(self._state.longest(rows), self._window)
        width = max(1, -(-known // _WINDOW_STEP)) * _WINDOW_STEP
        positions, slots = self._state.window(rows, width)
        readable = self._pool.holds(slots)
        positions, slots = positions.where(readable, _NOWHERE), slots.where(readable, NULL_SLOT)
        return self._forwards(positions, slots)

    @torch.inference_mode()
    def _captured(self, capture: Capture, max_sequences: int) -> Callable[[Tensor, Tensor], TreeForward]:
        return CapturedForwards(
            self._model,
            self._embed,
            self._pool,
            capture,
            max_batch=max_sequences,
            window=-(-self._window // _WINDOW_STEP) * _WINDOW_STEP,
            blocks=self._shape.blocks,
            starts=self._shape.starts,
        )

    def _as_it_is(self, positions: Tensor, slots: Tensor) -> TreeForward:
        return BlockForward(self._model, self._embed, self._pool, Window.of(positions, slots, self._pool))


def _taken(committed: Committed) -> Tensor:
    """Which of its slots hold a position. # -> [batch, depth + 1] bool"""
    return torch.arange(committed.slots.shape[1], device=committed.slots.device) < committed.counts[:, None]


def _entry_pool(model: SpecBlock, num_slots: int, device: torch.device | str) -> EntryPool:
    return EntryPool(
        num_layers=model.config.num_layers,
        num_slots=num_slots,
        entries=model.config.entries,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=model.dtype,
        device=device,
    )


def _side_by_side(trees: list[Candidates]) -> Candidates:
    """Nodes of all forwards; their parents already count across forwards."""
    return DraftTree(
        tokens=torch.cat([tree.tokens for tree in trees], dim=1),
        parents=torch.cat([tree.parents for tree in trees], dim=1),
        depths=torch.cat([tree.depths for tree in trees], dim=1),
        survival=torch.cat([tree.survival for tree in trees], dim=1),
        num_nodes=torch.stack([tree.num_nodes for tree in trees]).sum(0),
    )
