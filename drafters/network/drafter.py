"""The drafter of all trained networks: keeps entries of committed positions, drafts trees, and calibrates itself.
Legend: batch, rows = sequences of the engine's table, depth = longest accepted path."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.asking import ForwardGates
from drafters.network.blocks import TrainedWeights, TreeGrower
from drafters.network.pool import ROOM, Backlog, Waiting
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
from drafters.tree import Candidates
from kernels.graph_runner import send
from kernels.lattice import HostSizes, Keys
from kernels.sample import Filters


class SpecBlockDrafter(Drafter):
    """Drafter with trained weights of any kind, which drafts blocks of positions from the target's features."""

    name = "specblock"
    tap_layers: tuple[int, ...] = ()
    num_blocks = 0

    def __init__(self, sizes: DraftingSizes, weights: TrainedWeights) -> None:
        config = weights.network.config
        self.name, self.tap_layers = config.kind, config.tap_layers
        self._weights, self._grower = weights, TreeGrower(sizes, weights)
        self._gates = ForwardGates(weights.blocks - 1, sizes)
        self._backlog = Backlog(sizes.max_sequences)
        self._no_filters = Filters.off(torch.empty(0, dtype=torch.int64, device=sizes.device))
        self._has_grown = False  # whether it drafted since the last commit
        self._useful_from = [0] * sizes.max_sequences  # by row, first position to which later blocks attend
        self._slots: dict[int, Tensor] = {}  # row -> slot of each position
        self._never_run: dict[int, list[int]] = {}  # row -> first and last position without entries and marks

    @property
    def version(self) -> int:
        return self._weights.version()

    @property
    def ready(self) -> bool:
        return self._weights.ready()

    @property
    def wants_scores(self) -> bool:
        recorder = self._weights.recorder
        return recorder is not None and recorder.wants_scores

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._weights.record("start", lambda recorder: recorder.start(contexts))
        rows = [context.row for context in contexts]
        self._forget_never_run()
        self._grower.state.start(rows)
        self._backlog.clear(rows)
        for context in contexts:
            self._useful_from[context.row] = len(context.tokens) - self._weights.network.config.trained_length
            if context.slots is not None:
                self._slots[context.row] = context.slots
            if context.cached is not None:
                self._grower.state.adopt(context.row, context.cached)
        self._grower.calibration.forget(rows)

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Run the entries of those prompt positions to which later blocks attend."""
        self._weights.record("read", lambda recorder: recorder.read(read))
        if not self.ready:
            return
        pool, state = self._grower.pool, self._grower.state
        pool.forget(read.slots)
        if not read.follow:
            return
        self._forget_never_run()
        kept = slice(max(0, self._useful_from[read.row] - read.start), None)
        positions = read.start + torch.arange(read.tokens.shape[0], device=read.tokens.device)[kept]
        if not positions.shape[0]:
            return
        self._make_room(HostMetadata((read.row,), (read.start,)), ROOM, positions.device)
        (rows,) = send(positions.device, [read.row])
        counts = torch.full_like(rows, positions.shape[0])
        slots = read.slots[None, kept]
        state.append(rows, positions[:1], counts, slots)
        pool.hold(slots)
        waiting = Waiting(read.features[None, kept], read.tokens[None, kept], positions[None], slots)
        self._grower.ingest(rows, waiting)

    @torch.inference_mode()
    def grow(self, rows: Tensor, noise: Noise) -> Candidates:  # rows [batch]
        self._has_grown = True
        self._gates.begin(len(rows), warm=noise.warm)
        host = noise.host or HostMetadata.of(rows, noise.positions)
        filters = self._no_filters if noise.filters is None else noise.filters
        sizes = HostSizes(max(1, self._backlog.take(host)), noise.warm + (noise.filters is not None))
        keys = Keys(rows, noise.seeds, noise.temperatures, noise.positions, filters)
        tree, num_blocks = self._grower.grow(keys, sizes, self._gates.ask)
        self.num_blocks += num_blocks
        return tree

    def commit(self, committed: Committed) -> None:
        has_grown, self._has_grown = self._has_grown, False
        self._weights.record("commit", lambda recorder: recorder.commit(committed, grown=has_grown))
        if not self.ready:
            self._gates.end(None)
            return
        host = committed.host
        if committed.follow or has_grown or committed.tree.width or host is None or not self._slots:
            self._gates.end(self._update(committed, has_grown=has_grown))
            return
        for row, root in zip(host.rows, host.roots, strict=True):  # marked later: a suspended drafter costs little
            self._never_run.setdefault(row, [root, root])[1] = root
        self._gates.end(None)

    @torch.inference_mode()
    def _update(self, committed: Committed, *, has_grown: bool) -> Tensor | None:
        """Queue the entries of committed positions, or mark their slots as never run. Returns the outcome of the trees,
        if there are any. # -> [2], see `RankCalibration.learn`"""
        rows, positions, counts, slots = committed.rows, committed.positions, committed.counts, committed.slots
        if committed.follow:
            self._forget_never_run()
            host = committed.host or HostMetadata.of(rows, positions)
            self._make_room(host, slots.shape[1], rows.device)
            self._backlog.add(host, slots.shape[1])
            assert committed.features is not None, "the target taps no features for this drafter"
            return self._grower.take_in((rows, positions, counts, slots, committed.features, committed.tokens))
        if has_grown:
            return self._grower.pass_by((rows, counts, slots, committed.tokens))
        self._grower.pool.forget(slots)
        return None

    def finish(self, rows: Sequence[int]) -> list[int]:
        self._forget_never_run()
        self._grower.calibration.forget(rows)
        self._weights.record("end", lambda recorder: recorder.end(rows))
        return [0] * len(rows)

    def timed(self, times: StepTimes) -> None:
        self._gates.timed(times)

    def on_weights_changed(self) -> None:
        self._gates.on_weights_changed()
        if not self.ready:  # `read` and `commit` did not track slots before initialisation
            self._grower.pool.forget_all()

    def rank_outcomes(self) -> RankOutcomes:
        return self._grower.calibration.outcomes()

    def _forget_never_run(self) -> None:
        """Mark the deferred slots as never run. Must precede each use of the pool, which may reuse them."""
        if self._never_run:
            of_rows = [self._slots[row][first : last + 1] for row, (first, last) in self._never_run.items()]
            self._grower.pool.forget(torch.cat(of_rows))
            self._never_run.clear()

    def _make_room(self, host: HostMetadata, count: int, device: torch.device) -> None:
        """Run the waiting entries of rows whose queue may lack room for `count` more, because no tree grew for a
        while."""
        crowded = self._backlog.crowded(host, ROOM - count)
        if crowded.rows:
            (rows,) = send(device, crowded.rows)
            waiting = self._grower.state.take(rows, self._backlog.take(crowded))
            self._grower.ingest(rows, waiting)
