"""Builds a drafter by name. The only place that knows every kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.lookup.drafter import LookupDrafter
from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise, UntrainedDrafter
from drafters.random_tree import RandomTreeDrafter
from drafters.specblock.blocks import TreeShape
from drafters.specblock.drafter import SpecBlockDrafter
from drafters.specblock.growth import POLICIES
from drafters.specblock.model import SpecBlock
from drafters.specblock.recording import Recorder
from drafters.tree import Candidates, DraftTree
from kernels.graph_runner import Capture

MERGED = "lookup+specblock"
TRAINED = ("specblock", MERGED)
"""Drafters that need weights."""

_RANDOM_TREE_SEED = 0
_RANDOM_TREE_HIT_RATE = 0.7


@dataclass(frozen=True, slots=True)
class DraftingSizes:
    """Room that a drafter needs."""

    max_sequences: int
    max_length: int
    vocab_size: int
    num_slots: int
    max_nodes: int


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """A trained drafter network and the target's embedding it reads tokens with."""

    model: SpecBlock
    embed: Callable[[Tensor], Tensor]
    blocks: int = 2
    starts: int = 4
    policy: str = "best_first"
    recorder: Recorder | None = None  # of what may be learnt
    version: Callable[[], int] = lambda: 0  # of the weights that `model` holds now
    capture: Capture | None = None  # makes its forwards repeatable; None: they run as they are


class NoDrafter(UntrainedDrafter):
    """Grows the empty tree for everyone: plain decoding through the very same step."""

    name = "none"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return DraftTree.empty(rows.shape[0], rows.device)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn."""


def build_drafter(
    name: str, sizes: DraftingSizes, *, device: torch.device | str, weights: TrainedWeights | None = None
) -> Drafter:
    """The drafter of that name. Raises ValueError for an unknown one, or for a trained one without weights."""

    def lookup() -> Drafter:
        return LookupDrafter(
            max_sequences=sizes.max_sequences, max_length=sizes.max_length, max_nodes=sizes.max_nodes, device=device
        )

    def random_tree() -> Drafter:
        return RandomTreeDrafter(
            _RANDOM_TREE_SEED,
            sizes.vocab_size,
            sizes.max_nodes,
            _RANDOM_TREE_HIT_RATE,
            max_sequences=sizes.max_sequences,
            max_length=sizes.max_length,
            device=device,
        )

    def specblock() -> Drafter:
        if weights is None:
            raise ValueError(f"drafter {name!r} needs trained weights: set drafter_path")
        return SpecBlockDrafter(
            weights.model,
            weights.embed,
            shape=TreeShape(sizes.max_nodes, weights.blocks, weights.starts),
            policy=POLICIES[weights.policy],
            num_slots=sizes.num_slots,
            max_sequences=sizes.max_sequences,
            max_length=sizes.max_length,
            device=device,
            recorder=weights.recorder,
            version=weights.version,
            capture=weights.capture,
        )

    def merged() -> Drafter:
        return MergedDrafter(
            lookup(), specblock(), max_nodes=sizes.max_nodes, max_sequences=sizes.max_sequences, device=device
        )

    builders: dict[str, Callable[[], Drafter]] = {
        "lookup": lookup,
        "none": NoDrafter,
        "random": random_tree,
        "specblock": specblock,
        MERGED: merged,
    }
    if name not in builders:
        raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join(builders)}")
    return builders[name]()
