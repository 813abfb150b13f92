"""ParallelSpec (arXiv 2410.05589): K = 6 positions in one forward of one layer. The first sees condition and token, the
others are mask queries after it; a tree has one block."""

from dataclasses import dataclass
from typing import ClassVar

from drafters.network.config import DrafterConfig, Fields, NetworkTraits
from drafters.network.form import TrainedKind
from drafters.network.serving import BlockForward
from drafters.network.structure import Structure
from drafters.trained.specblock import FusedStructure
from drafters.training.forward import TrainingForward

_OPTIONS: Fields = {"shift": False, "broadcast": False}


@dataclass(frozen=True, slots=True)
class ParallelConfig(DrafterConfig):
    """A ParallelSpec drafter."""

    kind: ClassVar[str] = "parallel"
    trained_blocks: ClassVar[int] = 1

    def structure(self) -> Structure:
        return ParallelStructure(self)

    @property
    def options(self) -> Fields:
        return _OPTIONS

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(len(self.tap_layers))


class ParallelStructure(FusedStructure):
    """SpecBlock's input, whose first entry alone sees condition and token."""

    serving = BlockForward
    training = TrainingForward


KIND = TrainedKind(ParallelConfig, {"block_size": 6, "num_layers": 1, **_OPTIONS})
