"""Medusa (arXiv 2401.10774): heads on the target's own state, one for each position ahead, and no layers."""

from drafters.specblock.kind import TrainedKind

MEDUSA = TrainedKind(trained_blocks=1, shape={"block_size": 4, "num_layers": 0, "shift": False})
