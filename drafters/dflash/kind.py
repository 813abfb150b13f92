"""DFlash (arXiv 2602.06036): a block in one forward, two-way, on the target's features as keys and values."""

from drafters.specblock.kind import TrainedKind

DFLASH = TrainedKind(
    trained_blocks=1,
    shape={"block_size": 8, "num_layers": 2, "shift": False, "broadcast": False},
    context="injected",
    paths=4,
    two_way=True,
)
