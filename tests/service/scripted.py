"""An engine that answers from a script, and records to write scripts with."""

import threading
from collections.abc import Callable, Iterable

from service.engine.sequence import GenerationRequest, SequenceOutput, SpeculationRecord, Timings
from service.runtime import ModelCard, Runtime, Served
from service.tokenizer import ChatTokenizer
from tests.service.tiny_tokenizer import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
CARD = ModelCard(
    name="tiny-model",
    created=1_700_000_000,
    max_model_len=64,
    system_fingerprint="fp_tiny",
    drafter="lookup",
    numerics="exact",
    vocab_size=TOKENIZER.vocab_size,
    num_spec_tokens=4,
    eos_token_ids=frozenset({258}),
)
SPECULATION = SpeculationRecord((2, 0, 1), (4, 0, 3), 1, 2, "lookup", 7)
TIMINGS = Timings(0.25, 0.5, 1.5)

Script = Callable[[GenerationRequest], Iterable[list[SequenceOutput]]]


class ScriptedEngine:
    """Delivers the lists of a request's script one by one, from a thread of its own as a real engine does."""

    num_running = 1

    def __init__(self, script: Script) -> None:
        self.script = script
        self.submitted: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        self.num_waiting = 0

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        self.deliver = deliver

    def submit(self, request: GenerationRequest) -> None:
        self.submitted.append(request)
        self.threads.append(threading.Thread(target=lambda: [*map(self.deliver, self.script(request))]))
        self.threads[-1].start()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def drain(self) -> None:
        for thread in self.threads:
            thread.join()

    def stop(self) -> None:
        self.drain()


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


def runtime_of(engine: ScriptedEngine, *, max_waiting: int = 4) -> Runtime:
    return Runtime(lambda: Served(engine, TOKENIZER, CARD), max_waiting=max_waiting)
