"""What one client's load does to another's latency: a few streams alone, then beside many of somebody else.

Every stream asks its next question as soon as its last one is answered. Knows nothing of files or tables.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from service.engine.engine import Engine
from service.engine.requests import GenerationRequest, SamplingParams

QUIET, BUSY = "quiet", "busy"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourRow:
    """The quiet client's requests, from question to end of answer."""

    quiet_streams: int
    busy_streams: int
    answers: int
    latency_p50_seconds: float
    latency_p95_seconds: float
    ttft_p95_seconds: float
    tokens_per_second: float  # of both clients together
    quiet_tokens_per_second: float


class Neighbours:
    """Drives an engine by hand, as two clients that always ask as much as they may."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._numbers = count()
        self._asked: dict[str, float] = {}
        self._first: dict[str, float] = {}

    def run(self, *, quiet: int, busy: int, answers: int, watch: Callable[[], None] = lambda: None) -> NeighbourRow:
        """Until the quiet client has so many answers. `watch` hears of each of them."""
        for client, streams in ((BUSY, busy), (QUIET, quiet)):
            for _ in range(streams):
                self._ask(client)
        latencies: list[float] = []
        firsts: list[float] = []
        tokens = {QUIET: 0, BUSY: 0}
        start = time.perf_counter()
        while len(latencies) < answers:
            for output in self._engine.step().outputs:
                client = output.request_id.partition(" ")[0]
                tokens[client] += len(output.token_ids)
                self._first.setdefault(output.request_id, time.perf_counter())
                if output.finish_reason is not None:
                    asked, first = self._asked.pop(output.request_id), self._first.pop(output.request_id)
                    self._ask(client)
                    if client == QUIET:
                        latencies.append(time.perf_counter() - asked)
                        firsts.append(first - asked)
                        watch()
        seconds = time.perf_counter() - start
        self._stop()
        return NeighbourRow(
            quiet_streams=quiet,
            busy_streams=busy,
            answers=len(latencies),
            latency_p50_seconds=_quantile(latencies, 0.5),
            latency_p95_seconds=_quantile(latencies, 0.95),
            ttft_p95_seconds=_quantile(firsts, 0.95),
            tokens_per_second=sum(tokens.values()) / seconds,
            quiet_tokens_per_second=tokens[QUIET] / seconds,
        )

    def _ask(self, client: str) -> None:
        number = next(self._numbers)
        name = f"{client} {number}"
        self._asked[name] = time.perf_counter()
        self._engine.add(
            GenerationRequest(
                request_id=name,
                prompt=self._prompts[number % len(self._prompts)],
                sampling=SamplingParams(seed=0, max_tokens=self._max_tokens, temperature=0.0, ignore_eos=True),
                client=client,
            )
        )

    def _stop(self) -> None:
        for name in list(self._asked):
            self._engine.abort(name)
        self._asked.clear()
        self._first.clear()


def _quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values).quantile(share))
