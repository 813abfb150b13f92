"""EAGLE-3 (arXiv 2503.01840): one layer, one position per forward, each on the drafter's own state before it."""

from drafters.specblock.kind import TrainedKind

EAGLE3 = TrainedKind(
    trained_blocks=6,
    shape={"block_size": 1, "num_layers": 1, "shift": False},
)
