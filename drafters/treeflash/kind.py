"""TreeFlash (arXiv 2606.03819): one forward of the layers, then one position at a time, told the token before it."""

from drafters.specblock.kind import TrainedKind

TREEFLASH = TrainedKind(
    trained_blocks=8,
    shape={"block_size": 1, "num_layers": 2, "shift": False, "broadcast": False},
    context="injected",
    conditioned=True,
)
