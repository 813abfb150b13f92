"""The SpecBlock drafter behind the drafter protocol: entries in, draft trees out, calibration by what came true.
Legend: batch, rows = sequences of the engine's table, depth = longest accepted path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.gating import ForwardGates
from drafters.protocol import (
    Committed,
    DraftContext,
    Drafter,
    DraftingSizes,
    HostMetadata,
    Noise,
    RankOutcomes,
    Read,
    StepTimes,
)
from drafters.specblock.blocks import Block, Blocks, Keys, Sizes, TrainedWeights, of_tree
from drafters.specblock.pool import ROOM, Backlog, Waiting
from drafters.tree import Candidates


class SpecBlockDrafter(Drafter):
    """Drafts blocks of positions from the target's own features, whatever kind its weights are of."""

    name = "specblock"
    tap_layers: tuple[int, ...] = ()
    num_blocks = 0

    def __init__(self, sizes: DraftingSizes, weights: TrainedWeights) -> None:
        config = weights.network.config
        self.name, self.tap_layers = config.kind, config.tap_layers
        self._recorder = weights.recorder
        self._window = config.trained_length
        self._version, self._ready = weights.version, weights.ready
        self._blocks = blocks = Blocks(sizes, weights)
        self._pool, self._state, self._calibration = blocks.pool, blocks.state, blocks.calibration
        self._gates = ForwardGates(weights.blocks - 1, sizes)
        self._backlog = Backlog(sizes.max_sequences)
        self._has_grown = False  # since the last commit
        self._useful_from = [0] * sizes.max_sequences
        self._unseen: list[Tensor] = []  # slots committed lately of which no block will see anything

    @property
    def version(self) -> int:
        return self._version()

    @property
    def ready(self) -> bool:
        return self._ready()

    @property
    def wants_scores(self) -> bool:
        return self._recorder is not None and self._recorder.wants_scores

    def start(self, contexts: Sequence[DraftContext]) -> None:
        if self._recorder is not None:
            self._recorder.start(contexts)
        rows = [context.row for context in contexts]
        self._forget_unseen()
        self._state.start(rows)
        self._backlog.clear(rows)
        for context in contexts:
            self._useful_from[context.row] = len(context.tokens) - self._window
            if context.cached is not None:
                self._state.adopt(context.row, context.cached)
        self._calibration.forget(rows)

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Run the entries of prompt positions that later blocks can see; those that are not run are never seen."""
        if self._recorder is not None:
            self._recorder.read(read)
        if not self.ready:
            return
        self._pool.forget(read.slots)
        if not read.follow:
            return
        self._forget_unseen()
        kept = slice(max(0, self._useful_from[read.row] - read.start), None)
        positions = read.start + torch.arange(read.tokens.shape[0], device=read.tokens.device)[kept]
        if not positions.shape[0]:
            return
        self._make_room(HostMetadata((read.row,), (read.start,)), ROOM, positions.device)
        rows = torch.tensor([read.row], device=positions.device)
        counts = torch.full_like(rows, positions.shape[0])
        slots = read.slots[None, kept]
        self._state.append(rows, positions[:1], counts, slots)
        self._pool.hold(slots)
        waiting = Waiting(read.features[None, kept], read.tokens[None, kept], positions[None], slots)
        self._blocks.ingest(rows, waiting)

    @torch.inference_mode()
    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self._has_grown = True
        self._gates.begin(len(rows), warm=noise.warm)
        host = noise.host or HostMetadata.of(rows, noise.positions)
        sizes = Sizes(max(1, self._backlog.take(host)), noise.warm)
        keys = Keys(rows, noise.seeds, noise.temperatures, noise.positions)
        ground, first = self._blocks.begin((keys, sizes))
        grown: tuple[Block, ...] = (first,)  # the next trees may overwrite them
        self.num_blocks += len(rows)
        for number, follow in enumerate(self._blocks.follow):
            expected = grown[-1].further[0].picked.origin.survival[: len(rows)]  # [batch, starts]
            if not self._gates.ask(number, expected):
                break
            grown = (*grown, follow((), (ground, grown)))
            self.num_blocks += expected.numel()
        return self._blocks.tree((), of_tree(ground, grown)).first(len(rows))

    @torch.inference_mode()
    def commit(self, committed: Committed) -> None:
        if self._recorder is not None:
            self._recorder.commit(committed, grown=self._has_grown)
        if not self.ready:
            return
        rows, positions, counts, slots = committed.rows, committed.positions, committed.counts, committed.slots
        came = None
        if committed.follow:
            self._forget_unseen()
            host = committed.host or HostMetadata.of(rows, positions)
            self._make_room(host, slots.shape[1], rows.device)
            self._backlog.add(host, slots.shape[1])
            assert committed.features is not None, "the target taps no features for this drafter"
            came = self._blocks.take_in((rows, positions, counts, slots, committed.features, committed.tokens))
        elif self._has_grown:
            came = self._blocks.pass_by((rows, counts, slots, committed.tokens))
        else:  # a suspended drafter must be cheap
            self._unseen.append(slots.flatten())
        self._has_grown = False
        self._gates.end(came)

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._calibration.forget(rows)
        if self._recorder is not None:
            self._recorder.finish(rows)
        return [0] * len(rows)

    def timed(self, times: StepTimes) -> None:
        self._gates.took(times)

    def renew(self) -> None:
        self._gates.renew()
        if not self.ready:  # what becomes of slots is not followed while it has nothing to say
            self._pool.forget_all()

    def rank_outcomes(self) -> RankOutcomes:
        return self._calibration.outcomes()

    def _forget_unseen(self) -> None:
        """Before anything is looked up in the pool, or run into it, whose slots may be the same."""
        if self._unseen:
            self._pool.forget(torch.cat(self._unseen))
            self._unseen = []

    def _make_room(self, host: HostMetadata, most: int, device: torch.device) -> None:
        """Run what waits where so many more would not fit beside it: nobody drafted for a while."""
        crowded = self._backlog.crowded(host, ROOM - most)
        if crowded.rows:
            rows = torch.tensor(crowded.rows, device=device)
            waiting = self._state.take(rows, self._backlog.take(crowded))
            self._blocks.ingest(rows, waiting)
