"""Drafters under observation: what the assembly would build, with a recorder listening to the whole and to each source.

An observed drafter proposes the very same trees, only that of several sources all are asked in every step, whether or
not that pays: statistics over the steps that somebody chose would be biased. It is slower, so nothing is timed with it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from drafters.merged.drafter import MergedDrafter
from drafters.merged.worth import Worth
from drafters.protocol import Drafter, Noise
from drafters.registry import MERGED, TRAINED, TrainedWeights
from drafters.tree import Candidates
from service.assembly import Assembly
from service.bench.around import DrafterAround, without_noise
from service.bench.block_watch import BlockWatch
from service.bench.recorder import Recorder
from service.engine import build

_SOURCES = {MERGED: ("lookup", "specblock")}


@dataclass(frozen=True, slots=True)
class Observed:
    """A drafter and who listens to it."""

    drafter: Drafter
    recorder: Recorder


@contextmanager
def observed(
    assembly: Assembly, name: str, weights: TrainedWeights | None = None, *, coupled: bool = True
) -> Iterator[Observed]:
    """The drafter of that name, under observation until the context ends."""
    recorder = Recorder()
    watch = BlockWatch(weights.model, weights.embed) if weights and name in TRAINED else None
    seen = replace(weights, embed=watch.embed) if weights and watch else weights
    try:
        sources = [_source(assembly, source, seen, recorder, watch) for source in _SOURCES.get(name, (name,))]
        whole = _whole(_joined(assembly, sources), recorder)
        yield Observed(whole if coupled else without_noise(whole), recorder)
    finally:
        if watch:
            watch.close()


def _source(
    assembly: Assembly, name: str, weights: TrainedWeights | None, recorder: Recorder, watch: BlockWatch | None
) -> Drafter:
    def proposed(rows: Tensor, noise: Noise, tree: Candidates) -> None:
        recorder.proposed(name, rows, tree)

    def forwarded(rows: Tensor, noise: Noise, tree: Candidates) -> None:
        assert watch is not None
        proposed(rows, noise, tree)
        recorder.forwarded(rows, watch.collect(noise))

    inner = build.make_drafter(name, assembly.target, assembly.limits, weights)
    return DrafterAround(inner, grown=forwarded if name in TRAINED else proposed)


def _joined(assembly: Assembly, sources: Sequence[Drafter]) -> Drafter:
    if len(sources) == 1:
        return sources[0]
    cheap, costly = sources
    limits = assembly.limits
    return MergedDrafter(
        cheap,
        costly,
        max_nodes=limits.max_budget,
        max_sequences=limits.max_sequences,
        device=assembly.target.device,
        worth=Worth(clock=_standing_clock),
    )


def _standing_clock() -> float:
    """By this clock no drafter ever costs anything, so each is always worth asking."""
    return 0.0


def _whole(drafter: Drafter, recorder: Recorder) -> Drafter:
    def grown(rows: Tensor, noise: Noise, tree: Candidates) -> None:
        recorder.grown(rows, tree)

    return DrafterAround(
        drafter,
        started=recorder.started,
        grown=grown,
        committed=recorder.committed,
        finished=recorder.finished,
    )
