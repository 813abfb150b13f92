"""The kinds of trained drafters, as data: what each sets in the network, trees and training that they share."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Forward = Literal["entries", "injected", "conditioned"]
"""How layers meet committed positions and draft blocks:

- `entries`: a committed position is run through the layers as an entry, whose keys and values later blocks attend to;
- `injected`: each layer's keys and values of a committed position are made of its condition, and no layer runs on it;
- `conditioned`: as `injected`, and the layers run once per tree: further blocks are states of that forward, each
  conditioned on the token before its position by an MLP."""

_SHORT_BLOCK = 2  # positions; further forwards for so few are offered up to the trained depth, each taken while it pays


class TrainedKind(NamedTuple):
    """One kind of trained drafter. Blocks after the first start at the drafter's own states."""

    trained_blocks: int  # consecutive blocks that training goes through
    shape: Mapping[str, Any]  # fields of `SpecBlockConfig`; always `block_size` and `num_layers`
    forward: Forward = "entries"
    two_way: bool = False  # entries of a block attend to all of the block, not only to those before; `injected` only
    paths: int = 1  # likeliest paths that go on at each position of a block; above 1 only where a tree has one block
    family: str | None = None  # of its layers as the kind is published, of `FUSED_FAMILIES`; None: the target's
    with_target: bool = False  # published together with the target, and never trained from the beginning

    @property
    def conditioned(self) -> bool:
        """Whether one forward of the layers serves all blocks of a tree."""
        return self.forward == "conditioned"

    def blocks(self, requested: int) -> int:
        """Return the number of blocks per tree: what was requested, except for kinds that were trained for one block
        or draft from one forward (then the trained number), and for short blocks (at least the trained number)."""
        if self.trained_blocks == 1 or self.conditioned:
            return self.trained_blocks
        return max(requested, self.trained_blocks) if self.shape["block_size"] <= _SHORT_BLOCK else requested


_PLAIN = {"shift": False}  # no layer-wise shift
_PUBLISHED = {"token_beside": True, "normalise_features": False}  # as EAGLE-3's files have it
_QUERIES = {"shift": False, "broadcast": False}  # and only a block's first entry sees condition and token
_MASKS = {**_QUERIES, "normalise_features": False, "silent_first": True}  # as DFlash is published; with a mask token

TRAINED_KINDS: dict[str, TrainedKind] = {
    # SpecBlock (arXiv 2605.07243)
    "specblock": TrainedKind(2, {"block_size": 4, "num_layers": 2}),
    # EAGLE-3 (arXiv 2503.01840): one layer, one position per forward, each on the drafter's own state before it; in the
    # published shape, so that other engines read what is trained here
    "eagle3": TrainedKind(6, {"block_size": 1, "num_layers": 1, **_PLAIN, **_PUBLISHED}, family="llama"),
    # DFlash (arXiv 2602.06036): a block in one forward, two-way, on the target's features as keys and values
    "dflash": TrainedKind(
        1, {"block_size": 8, "num_layers": 2, **_MASKS}, "injected", two_way=True, paths=4, family="qwen3"
    ),
    # JetSpec (arXiv 2606.18394): as DFlash, causal within the block
    "jetspec": TrainedKind(1, {"block_size": 8, "num_layers": 2, **_MASKS}, "injected", paths=4, family="qwen3"),
    # TreeFlash (arXiv 2606.03819): one forward of the layers, then one position at a time, given the token before it
    "treeflash": TrainedKind(8, {"block_size": 1, "num_layers": 2, **_QUERIES}, "conditioned"),
    # A multi-token prediction module that the target was trained with, as MiMo's (arXiv 2505.07608)
    "mtp": TrainedKind(2, {"block_size": 1, "num_layers": 1, **_PLAIN}, with_target=True),
}
"""By the name that drafter files carry and that the setting `drafter` takes."""

MOVED_KINDS = ("parallel", "medusa", "falcon")
"""Kinds of release 0.3.0 that are plug-ins of the benchmarks now."""


def why_unknown(kind: str) -> str:
    """Return why no kind has this name, to follow the name in a message."""
    if kind in MOVED_KINDS:
        return "is a plug-in of benchmarks/baselines in the source now: use it from there, or a drafter of another kind"
    return f"is none of {', '.join(TRAINED_KINDS)}"
