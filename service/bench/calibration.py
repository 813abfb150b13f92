"""A run whose load and traffic change: legs of rising concurrency, again and again, of one kind
of prompt and then of another.

Drives one engine through all of it, so that whatever corrects itself online has to follow. Knows nothing of costs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from service.bench.load import ClosedLoop, LoadRun, drive
from service.bench.shift_stream import Stream
from service.bench.speed import Measure, requests_from
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest

_ROUNDS = 2
"""Queries of each client in a leg: after the first round prompts are read beside answers under way."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch over which neither traffic nor concurrency changes."""

    phase: int
    concurrency: int
    requests: tuple[GenerationRequest, ...]


@dataclass(frozen=True, slots=True)
class PlayedLeg:
    """A leg and what serving it reported."""

    leg: Leg
    run: LoadRun


def legs_of(stream: Stream, concurrency: Sequence[int], measure: Measure) -> list[Leg]:
    """The whole stream. Each phase begins the cycle of concurrencies anew; its last leg may be shorter."""
    prompts = [prompt for phase in stream.phases for prompt in phase.prompts]
    requests = [_ending_by_itself(request) for request in _requests(prompts, measure)]
    legs: list[Leg] = []
    begin = 0
    for number, phase in enumerate(stream.phases):
        end, clients = begin + len(phase.prompts), cycle(concurrency)
        while begin < end:
            count = next(clients)
            behind = min(end, begin + _ROUNDS * count)
            legs.append(Leg(number, count, tuple(requests[begin:behind])))
            begin = behind
    return legs


def play(engine: Engine, legs: Sequence[Leg], advance: Callable[[int], None] = lambda queries: None) -> list[PlayedLeg]:
    """Serve all legs, one after the other. `advance` hears of queries as they are done."""
    played = []
    for leg in legs:
        played.append(PlayedLeg(leg, drive(engine, leg.requests, ClosedLoop(leg.concurrency))))
        advance(len(leg.requests))
    return played


def _requests(prompts: Sequence[Sequence[int]], measure: Measure) -> list[GenerationRequest]:
    return requests_from(prompts, 0, replace(measure, concurrency=len(prompts)))


def _ending_by_itself(request: GenerationRequest) -> GenerationRequest:
    """What follows an end is nobody's traffic."""
    return replace(request, sampling=replace(request.sampling, ignore_eos=False))
