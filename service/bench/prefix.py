"""What the prefix cache saves: time to first token of prompts that begin alike, the first one and those behind it.

Each way has all the requests to itself, because engines of one target write into the same slots; later requests are
compared with the first one of their own way, and all answers must be equal. Knows nothing of files or tables.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from service.bench.generate import count_mismatches
from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, one after the other: nobody else runs."""

    tokens: tuple[int, ...]
    first_token_seconds: float
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRow:
    """All requests with or without the cache."""

    prefix_cache: bool
    requests: int
    shared_tokens: int
    ttft_first_seconds: float
    ttft_later_p50_seconds: float
    ttft_later_p95_seconds: float
    cached_tokens: int
    mismatched_tokens: int  # against the run without the cache

    @property
    def ratio(self) -> float:
        """Of a later request's time to first token to the first one's."""
        return self.ttft_later_p50_seconds / self.ttft_first_seconds


def measure(
    engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int, watch: Callable[[], None] = lambda: None
) -> list[Asked]:
    """Ask everything, one after the other. `watch` hears of each prompt's end."""
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(ask(engine, prompt, max_tokens=max_tokens, name=str(number)))
        watch()
    return answers


def ask(engine: Engine, prompt: Sequence[int], *, max_tokens: int, name: str) -> Asked:
    """One greedy answer."""
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    engine.add(GenerationRequest(request_id=name, prompt=prompt, sampling=sampling))
    tokens: list[int] = []
    start, first, cached = time.perf_counter(), 0.0, 0
    while not engine.idle:
        for output in engine.step().outputs:
            first = first or time.perf_counter() - start
            tokens += output.token_ids
            cached = max(cached, output.cached_tokens)
    return Asked(tuple(tokens), first, cached)


def row_of(asked: Sequence[Asked], reference: Sequence[Asked], *, prefix_cache: bool, shared_tokens: int) -> PrefixRow:
    """The figures of one way, its answers compared with those of `reference`."""
    later = torch.tensor([one.first_token_seconds for one in asked[1:]])
    return PrefixRow(
        prefix_cache=prefix_cache,
        requests=len(asked),
        shared_tokens=shared_tokens,
        ttft_first_seconds=asked[0].first_token_seconds,
        ttft_later_p50_seconds=float(later.quantile(0.5)),
        ttft_later_p95_seconds=float(later.quantile(0.95)),
        cached_tokens=sum(one.cached_tokens for one in asked),
        mismatched_tokens=sum(
            count_mismatches(theirs.tokens, mine.tokens) for mine, theirs in zip(asked, reference, strict=True)
        ),
    )
