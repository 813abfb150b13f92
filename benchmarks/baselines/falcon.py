"""Falcon (arXiv 2412.12639), semi-autoregressive: K = 2 positions in one forward, the second depends on the first
through attention and shift; three forwards in a row, each on the drafter's own states. Trained without the paper's
glancing."""

from dataclasses import dataclass
from typing import ClassVar

from benchmarks.baselines.parallel import ParallelStructure
from drafters.network.config import DrafterConfig, Fields, NetworkTraits
from drafters.network.form import TrainedKind
from drafters.network.structure import Structure


@dataclass(frozen=True, slots=True)
class FalconConfig(DrafterConfig):
    """A Falcon drafter."""

    kind: ClassVar[str] = "falcon"
    trained_blocks: ClassVar[int] = 3

    def structure(self) -> Structure:
        return ParallelStructure(self)

    @property
    def options(self) -> Fields:
        return {"broadcast": False}

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(len(self.tap_layers), shifts=self.num_layers - 1)


KIND = TrainedKind(FalconConfig, {"block_size": 2, "num_layers": 2, "broadcast": False})
