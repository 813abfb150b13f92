"""ParallelSpec (arXiv 2410.05589): mask queries behind the newest position, answered in one forward of one layer."""

from drafters.specblock.kind import TrainedKind

PARALLEL = TrainedKind(
    trained_blocks=1,
    shape={"block_size": 6, "num_layers": 1, "shift": False, "broadcast": False},
)
