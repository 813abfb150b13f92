"""An engine that answers from a script, and records to write scripts with."""

import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from adaptation.records import AdaptationStatus, Event
from service.engine.requests import (
    GenerationRequest,
    SamplingParams,
    Scope,
    SequenceOutput,
    SpeculationRecord,
    Submission,
    Timings,
)
from service.observability.guard import Guard
from service.runtime import ModelCard, Runtime, ServedModel
from service.text.tokenizer import ChatTokenizer
from tests.service.text.tiny_tokenizer import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
CARD = ModelCard(
    name="tiny-model",
    created=1_700_000_000,
    max_model_len=64,
    system_fingerprint="fp_tiny",
    drafter="memory",
    numerics="exact",
    vocab_size=TOKENIZER.vocab_size,
    num_spec_tokens=4,
    eos_token_ids=frozenset({258}),
)
SPECULATION = SpeculationRecord((2, 0, 1), (4, 0, 3), 1, 2, "memory", 7)
TIMINGS = Timings(0.25, 0.5, 1.5)

STATUS = AdaptationStatus(
    phase="learning",
    collected_positions=0,
    wanted_positions=0,
    policy="bandit",
    paused=False,
    version=2,
    origin=1,
    newest=3,
    condemned=(2,),
    snapshots=(1, 3),
    balance_seconds=1.5,
    values={"head": 0.5, "full": float("inf")},
    waiting={"head": 3, "full": 0},
    validation_texts=5,
    queries_observed=40,
    queries_dropped=1,
    queries_excluded=6,
    excluded={"over_share": 4, "not_stored": 2},
    samples_dropped=7,
    decisions={"skip:warm_up": 10, "head:gain": 8},
    updates={"head": 3, "full": 1},
    publishes=2,
    refusals=1,
    rollbacks=1,
    discards=0,
    training_seconds=1.5,
    kl_to_anchor=None,
    failures={"update": 1},
    restarts=0,
    events=(Event("published", 2, "better", {"candidate": 2.5}, unix_seconds=1_700_000_000.5),),
)

Script = Callable[[GenerationRequest], Iterable[list[SequenceOutput]]]


class ScriptedEngine:
    """Delivers the lists of a request's script one by one, from a thread of its own as a real engine does."""

    num_running = 1

    def __init__(self, script: Script) -> None:
        self.script = script
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.forgotten: list[str | None] = []
        self.threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self.guard = Guard()
        self.is_full = False  # whether what comes waits, and does not start
        self.num_woken = 0
        self.stopped = False

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        self.deliver = deliver

    def submit(self, body: Submission) -> None:
        body.waits = self.is_full
        for request in body.requests:
            self.submitted.append(request)
            self.threads.append(threading.Thread(target=self._run, args=[request]))
            self.threads[-1].start()

    def _run(self, request: GenerationRequest) -> None:
        for outputs in self.script(request):
            self.deliver(outputs)

    def abort(self, *request_ids: str) -> None:
        self.aborted += request_ids

    def forget(self, scope: str | None = None) -> None:
        self.forgotten.append(scope)

    def wake(self) -> None:
        self.num_woken += 1

    def drain(self) -> None:
        for thread in self.threads:
            thread.join()

    def stop(self) -> None:
        self.stopped = True
        self.drain()


class Held(ScriptedEngine):
    """Says one piece, and the other one when `go_on` is set, or at the end."""

    def __init__(self, first: str = "a", last: str = "b") -> None:
        self.go_on = threading.Event()
        self._first, self._last = first, last
        super().__init__(self._script)

    def _script(self, request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
        yield [step(request, index, self._first) for index in range(request.n)]
        assert self.go_on.wait(10)
        yield [step(request, index, self._last, "stop") for index in range(request.n)]

    def stop(self) -> None:
        self.go_on.set()
        super().stop()


class Endless(ScriptedEngine):
    """Says the same every few milliseconds until a request is aborted; `text` replaces the text of its one token."""

    def __init__(self, text: str = "x") -> None:
        self.stopped_speaking = threading.Event()
        self._text = text
        super().__init__(self._script)

    def _script(self, request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
        while not self.stopped_speaking.wait(0.005):
            yield [replace(step(request, 0, "x"), text=self._text)]

    def abort(self, *request_ids: str) -> None:
        self.stopped_speaking.set()


class ScriptedAdaptation:
    """Remembers what it was asked for, and in which thread."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.refusal = refusal
        self.asked: list[str] = []
        self.threads: set[int] = set()
        self.paused = False

    def start(self, wake: Callable[[], None]) -> None:
        self._note("start")
        wake()

    def stop(self) -> None:
        self._note("stop")

    def status(self) -> AdaptationStatus:
        self._note("status")
        return replace(STATUS, paused=self.paused)

    def pause(self) -> None:
        self._note("pause")
        self.paused = True

    def resume(self) -> None:
        self._note("resume")
        self.paused = False

    def rollback(self) -> int:
        self._note("rollback")
        return 4

    def load_from_disk(self, folder: Path) -> int:
        self._note(f"load {folder}")
        return 5

    def _note(self, name: str) -> None:
        self.asked.append(name)
        self.threads.add(threading.get_ident())
        if self.refusal is not None and name not in ("start", "stop"):
            raise self.refusal


def say(*pieces: str, finish: str = "stop") -> Script:
    """Every sequence gets one step per piece; the last one ends it with all the totals."""

    def script(request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            yield [step(request, index, piece, finish if last else None) for index in range(request.n)]

    return script


def step(request: GenerationRequest, index: int, text: str, finish: str | None = None) -> SequenceOutput:
    return SequenceOutput(
        request_id=request.request_id,
        index=index,
        token_ids=tuple(TOKENIZER.encode(text)),
        text=text,
        finish_reason=finish,  # type: ignore[arg-type]
        speculation=SPECULATION if finish else None,
        timings=TIMINGS if finish else None,
        cached_tokens=3,
    )


def fill(runtime: Runtime, engine: ScriptedEngine) -> None:
    """Let others take all places of a queue of four."""
    engine.is_full = True
    for name in "abcd":
        sampling = SamplingParams(seed=0, max_tokens=8)
        runtime.generate(GenerationRequest(request_id=name, prompt=(1,), sampling=sampling, scope=Scope(address=name)))


@asynccontextmanager
async def running(
    engine: ScriptedEngine, *, max_waiting: int = 4, adaptation: ScriptedAdaptation | None = None
) -> AsyncIterator[Runtime]:
    """A runtime that has loaded and will be stopped."""
    runtime = runtime_of(engine, max_waiting=max_waiting, adaptation=adaptation)
    await runtime.start()
    await runtime.wait_until_loaded()
    yield runtime
    await runtime.stop()


def runtime_of(
    engine: ScriptedEngine,
    *,
    max_waiting: int = 4,
    adaptation: ScriptedAdaptation | None = None,
    tokenizer: ChatTokenizer = TOKENIZER,
) -> Runtime:
    return Runtime(lambda: ServedModel(engine, tokenizer, CARD, adaptation), max_waiting=max_waiting)
