"""Copies of a drafter: serving weights (written by this module only), training copy, anchor and replica.

New weights are staged by the adaptation thread and written by the engine thread in `between_steps`, in place and as a
whole, so that a step never sees two versions. Every change of the serving weights, also a restore, gets a new and
higher version number.
"""

import copy
import logging
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from adaptation.checkpoint import SNAPSHOTS, Layout, SnapshotInfo, SnapshotRing, layout_of, now
from adaptation.config import AdaptationConfig, Tuning
from adaptation.records import Damaged, NotRemoved
from drafters.network.checkpoint import weights_of, write_weights
from drafters.network.model import DrafterConfig, Embed, SpecBlock
from drafters.training.fit import bf16_is_faster

Prepare = Callable[[Mapping[str, Tensor]], Callable[[], None]]
"""Prepares weights, by name in the serving dtype, in the learning thread. The function it returns writes them to the
serving drafter, in the engine's thread, and must be quick."""

logger = logging.getLogger(__name__)

ANCHOR = 0
"""The version of the deployed drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """The serving drafter, and the parts of its target that learning needs."""

    config: DrafterConfig
    weights: Mapping[str, Tensor]  # tensors by name, in the serving dtype
    target_head: Tensor | None  # [target_vocab, hidden], output rows for tokens the anchor lacks; None: unknown
    prepare: Prepare
    embed: Embed  # the target's embedding, on the device that trains
    embedding: Tensor | None  # [target_vocab, hidden], the target's table for a training process; None: no process
    blocks: int = 2  # M, blocks per served tree
    made: bool = True  # False: no trained weights yet; they are solved from traffic
    given: Mapping[str, Tensor] | None = None  # weights of another target's drafter, tried before solving


@dataclass(frozen=True, slots=True)
class Version:
    """Weights that are served or staged. They are never modified, so any thread may read them."""

    version: int
    origin: int  # version that first had these weights; 0 is the anchor
    weights: dict[str, Tensor]  # tensors by name, in the serving dtype
    write: Callable[[], None]
    replaced: dict[str, Tensor] | None = None  # the weights that a publish replaced


class DrafterWeights:
    """Owns serving weights, training copy, frozen anchor, and the replica on which drafters are scored."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: DrafterConfig,
        *,
        prepare: Prepare,
        snapshots: SnapshotRing,
        train_device: torch.device | str,
        replica_dtype: torch.dtype | None = None,
    ) -> None:
        """`weights`: serving weights by name; `prepare`: makes weights ready for the engine; `replica_dtype`: type in
        which the replica computes, if that is faster than the serving type."""
        self.snapshots = snapshots
        self.on_staged: Callable[[], None] = lambda: None  # called by the adaptation thread; set before it starts
        self._prepare = prepare
        served = {name: value.detach().clone() for name, value in weights.items()}
        self._first = {name: value.cpu().clone() for name, value in served.items()}
        self._served = Version(ANCHOR, ANCHOR, served, lambda: None)
        self.anchor = _model(config, weights, torch.float32, train_device)
        self.training = _model(config, weights, torch.float32, train_device).requires_grad_(True)
        self.replica = _model(config, weights, replica_dtype or served["lm_head.weight"].dtype, train_device)
        self.condemned: set[int] = set()
        self.highest = max([ANCHOR, *snapshots.versions])  # highest version ever used, by earlier processes too
        self._staged: Version | None = None
        self._lock = threading.Lock()

    @property
    def layout(self) -> Layout:
        """Names, shapes and types of the serving weights."""
        return layout_of(self._first)

    @property
    def train_device(self) -> torch.device:
        """Device of training copy, anchor and replica."""
        return self.training.d2t.device

    @property
    def version(self) -> int:
        """Version number of the served weights."""
        return self._served.version

    @property
    def newest(self) -> int:
        """Version number of `latest`."""
        return self.latest.version

    @property
    def origin(self) -> int:
        """Version number that first had the served weights."""
        return self._served.origin

    @property
    def latest(self) -> Version:
        """The staged weights if there are any, else the served ones."""
        return self._staged or self._served

    @property
    def pending(self) -> bool:
        """Whether weights are staged."""
        return self._staged is not None

    def between_steps(self) -> int:
        """Write staged weights, if any, and return the version of the next step. Called by the engine thread between
        two steps. An exception leaves the former weights in place, and the new ones staged."""
        if self._staged is not None:
            with self._lock:
                self._write(self._staged)
        return self.version

    def publish(self, scores: Mapping[str, float]) -> int:
        """Store the training copy as a snapshot, stage it, and return its version. Raises NotStored, and then the
        served weights stay."""
        assert not self.pending, "the previous version is still staged"
        return self._add(self._as_served(weights_of(self.training)), scores, replaced=self._served.weights)

    def adopt(self, weights: Mapping[str, Tensor]) -> int:
        """Store weights of an operator or a leader, shapes [...] as in `layout`, as a snapshot; stage them, and return
        their version. Raises NotStored, and then the served weights stay."""
        return self._add(self._as_served(weights), {})

    def restore(self, version: int) -> Version:
        """Stage the weights of an older version; 0 is the anchor. Raises Damaged if they cannot be read."""
        weights = self._first if version == ANCHOR else self.snapshots.get(version, self.layout).tensors
        return self._bring_back(version, weights)

    def restore_before(self, version: int) -> Version:
        """Stage the newest readable weights that are older than `version` and not condemned; the anchor if there are
        none."""
        for older in reversed(self.snapshots.versions):
            if older >= version or older in self.condemned:
                continue
            try:
                return self._bring_back(older, self.snapshots.get(older, self.layout).tensors)
            except Damaged as error:
                logger.warning("skipping drafter version %d in the rollback: %s", older, error)
        return self._bring_back(ANCHOR, self._first)

    def condemn(self) -> int:
        """Exclude the served or staged weights from later restores. Returns the version that first had them."""
        origin = self.latest.origin
        if origin != ANCHOR:
            self.condemned.add(origin)
        return origin

    def resume(self, newest: int, condemned: set[int]) -> None:
        """Continue after the version numbers of an earlier process, and exclude the versions that it condemned."""
        self.highest = max(self.highest, newest)
        self.condemned |= condemned

    @torch.no_grad()
    def train_from_served(self) -> dict[str, Tensor]:
        """Return the served or staged weights in fp32, shapes [...] as in `layout`, for the training copy to start
        from."""
        return {
            name: value.float() if value.is_floating_point() else value for name, value in self.latest.weights.items()
        }

    def served(self) -> SpecBlock:
        """Load the served or staged weights into the replica and return it. The next load overwrites them."""
        return self._as_replica(self.latest.weights)

    def served_in_full(self) -> SpecBlock:
        """Return a new model with the served or staged weights in fp32, the type of the anchor."""
        model = copy.deepcopy(self.anchor)
        write_weights(model, self.latest.weights)
        return model

    def candidate(self) -> SpecBlock:
        """Load the training copy's weights into the replica, in the serving type, and return it."""
        return self._as_replica(self._as_served(weights_of(self.training)))

    def previous(self) -> SpecBlock:
        """Load the weights that the last publish replaced into the replica, and return it."""
        assert self.latest.replaced is not None, "no publish has replaced weights"
        return self._as_replica(self.latest.replaced)

    def unchanged(self) -> SpecBlock:
        """Load the anchor's weights into the replica, and return it."""
        return self._as_replica(weights_of(self.anchor))

    def _bring_back(self, origin: int, weights: Mapping[str, Tensor]) -> Version:
        staged = self._prepared(self._claim(), origin, self._as_served(weights))
        self._stage(staged)
        return staged

    def _claim(self) -> int:
        """Return the next version number. The number of a failed publish is not used again: its snapshot may be on
        disk."""
        self.highest += 1
        return self.highest

    def _add(
        self, weights: dict[str, Tensor], scores: Mapping[str, float], *, replaced: dict[str, Tensor] | None = None
    ) -> int:
        version = self._claim()
        staged = self._prepared(version, version, weights, replaced)
        served = self.latest.origin
        info = SnapshotInfo(version, served, now(), dict(scores))
        try:
            self.snapshots.add(info, weights, served=served, condemned=self.condemned)
        except NotRemoved as error:
            logger.warning("%s; the next publish tries again", error)
        self._stage(staged)
        return version

    def _prepared(
        self, version: int, origin: int, weights: dict[str, Tensor], replaced: dict[str, Tensor] | None = None
    ) -> Version:
        """Prepare weights to be written. An exception here has changed nothing."""
        staged = Version(version, origin, weights, self._prepare(weights), replaced)
        device = self._served.weights["lm_head.weight"].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the engine's stream does not wait for this one
        return staged

    def _stage(self, staged: Version) -> None:
        """Stage weights. A restore may replace staged weights, which are then never served."""
        with self._lock:
            self._staged = staged
        self.on_staged()

    @torch.no_grad()
    def _write(self, staged: Version) -> None:
        try:
            staged.write()
        except Exception:
            self._prepare(self._served.weights)()  # a part may have been written
            raise
        for value in staged.weights.values():
            if value.is_cuda:
                value.record_stream(torch.cuda.current_stream(value.device))
        self._served = staged  # set before `_staged` is cleared, so that `latest` never goes back
        self._staged = None

    @torch.no_grad()
    def _as_served(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: weights[name].detach().to(device=value.device, dtype=value.dtype, copy=True)
            for name, value in self._served.weights.items()
        }

    def _as_replica(self, weights: Mapping[str, Tensor]) -> SpecBlock:
        write_weights(self.replica, weights)
        return self.replica


def in_place(model: SpecBlock) -> Prepare:
    """Return a `Prepare` that copies weights into a network of the training form."""
    return lambda weights: partial(write_weights, model, weights)


def copies_of(
    drafter: ServedDrafter, config: AdaptationConfig, tuning: Tuning, folder: Path
) -> tuple[DrafterWeights, bool]:
    """Build the copies of the drafter. Returns them, and whether to train with products in bf16."""
    head = drafter.weights["lm_head.weight"]
    device = head.device if config.train_device == "same" else torch.device(config.train_device)
    in_bf16 = head.dtype == torch.bfloat16
    autocast = in_bf16 and bf16_is_faster(device)
    weights = DrafterWeights(
        drafter.weights,
        drafter.config,
        prepare=drafter.prepare,
        snapshots=SnapshotRing(folder / SNAPSHOTS, size=tuning.snapshots),
        train_device=device,
        replica_dtype=torch.float32 if in_bf16 and not autocast else None,
    )
    return weights, autocast


def _model(
    config: DrafterConfig, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str
) -> SpecBlock:
    model = SpecBlock(config).to(device=device, dtype=dtype).eval().requires_grad_(False)
    write_weights(model, weights)
    return model


_ALIGNMENT = 64  # bytes


def shared(named: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    """Copy tensors of any shape [...] to anonymous shared memory, which a process that inherits the descriptor can map;
    not to /dev/shm, which containers keep small. Returns the descriptor and the copies by name."""
    memory = os.memfd_create("adaptree-training")
    os.ftruncate(memory, sum(_room(tensor) for tensor in named.values()))
    tensors = mapped(memory, named)
    for name, tensor in named.items():
        tensors[name].copy_(tensor.detach())
    return memory, tensors


def mapped(memory: int, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map tensors with the shapes [...] and types of `like`, one after another in this memory. The tensors keep the
    mapping alive."""
    pages, tensors, start = mmap.mmap(memory, os.fstat(memory).st_size), {}, 0
    for name, tensor in like.items():
        flat = torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel(), offset=start)
        tensors[name] = flat.view(tensor.shape)
        start += _room(tensor)
    return tensors


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def lend(tensors: Mapping[str, Tensor], to: Mapping[str, Tensor]) -> None:
    """Let parameters [...], which stay the same objects, use these tensors' memory."""
    for name, tensor in to.items():
        tensor.data = tensors[name]
