"""Who gives way when slots or lines run out. Knows nothing of why they did."""

from collections.abc import Sequence as Items

from service.engine.prefix_cache import SlotCache
from service.engine.sequence import Sequence

_OFTEN = 2


def sheltered(running: Items[Sequence]) -> Sequence:
    """The one that has been here longest: it never gives way, so everyone's turn to get on comes."""
    return min(running, key=lambda sequence: sequence.number)


def cheapest(running: Items[Sequence], spared: Sequence, cache: SlotCache) -> Sequence | None:
    """Least important, not preempted often, least to compute again, newest: in this order. None if all are spared."""
    return min(
        (sequence for sequence in running if sequence is not spared),
        key=lambda sequence: (
            -sequence.request.priority,
            sequence.preemptions >= _OFTEN,
            _to_compute_again(sequence, cache),
            -sequence.number,
        ),
        default=None,
    )


def _to_compute_again(sequence: Sequence, cache: SlotCache) -> int:
    """Positions that may be lost: what others hold as well stays in the cache."""
    return sequence.num_computed - (cache.num_kept(sequence.lease) if sequence.lease else 0)
