"""JetSpec (arXiv 2606.18394): a block in one forward, causal, on the target's features as keys and values."""

from drafters.specblock.kind import TrainedKind

JETSPEC = TrainedKind(
    trained_blocks=1,
    shape={"block_size": 8, "num_layers": 2, "shift": False, "broadcast": False},
    context="injected",
    paths=4,
)
