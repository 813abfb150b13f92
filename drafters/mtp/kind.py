"""A module for further tokens that a target was trained with, as MiMo's (arXiv 2505.07608)."""

from drafters.specblock.kind import TrainedKind

MTP = TrainedKind(
    trained_blocks=2,
    shape={"block_size": 1, "num_layers": 1, "shift": False},
    with_target=True,
)
