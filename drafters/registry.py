"""Builds a drafter by name. The only place that knows every kind."""

from collections.abc import Callable

import torch

from drafters.lookup.drafter import LookupDrafter
from drafters.none import NoDrafter
from drafters.protocol import Drafter
from drafters.random_tree.drafter import RandomTreeDrafter

_RANDOM_TREE_SEED = 0
_RANDOM_TREE_HIT_RATE = 0.7


def build_drafter(
    name: str,
    *,
    max_sequences: int,
    max_length: int,
    vocab_size: int,
    max_nodes: int,
    device: torch.device | str,
) -> Drafter:
    """The drafter of that name, with room for so many running sequences of so many tokens."""

    def lookup() -> Drafter:
        return LookupDrafter(max_sequences=max_sequences, max_length=max_length, max_nodes=max_nodes, device=device)

    def random_tree() -> Drafter:
        return RandomTreeDrafter(
            _RANDOM_TREE_SEED,
            vocab_size,
            max_nodes,
            _RANDOM_TREE_HIT_RATE,
            max_sequences=max_sequences,
            max_length=max_length,
            device=device,
        )

    builders: dict[str, Callable[[], Drafter]] = {"lookup": lookup, "none": NoDrafter, "random": random_tree}
    if name not in builders:
        raise ValueError(f"unknown drafter {name!r}: choose one of {', '.join(builders)}")
    return builders[name]()
