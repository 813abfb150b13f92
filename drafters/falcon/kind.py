"""Falcon (arXiv 2412.12639): two dependent positions per forward, several forwards, and training that lets on."""

from drafters.specblock.kind import TrainedKind

FALCON = TrainedKind(
    trained_blocks=3,
    shape={"block_size": 2, "num_layers": 2, "broadcast": False},
    glancing=0.3,
)
