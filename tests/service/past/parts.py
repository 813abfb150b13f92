"""Small engines that remember past answers, in threads, beside what keeps or shares these."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import DraftContext, MemorySizes
from drafters.registry import memory_of
from drafters.tree import DraftTree
from service.engine.engine import EngineOutput
from service.engine.requests import Scope, SequenceOutput, Submission
from service.engine.stats import LoadStats, StepStats
from service.engine.thread import EngineThread
from service.past.file import AnswersFile, MemoryFile
from tests.service.engine.harness import LIMITS, greedy, request, tiny_engine

PATIENCE_SECONDS = 20.0
SIZES = MemorySizes(num_bytes=1 << 20, owners=2)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Server:
    """An engine in its thread; `ended` is called when that ends."""

    def __init__(self, sizes: MemorySizes = SIZES) -> None:
        self.engine = tiny_engine(drafter="memory", limits=replace(LIMITS, memory=sizes))
        memory = memory_of(self.engine.drafter)
        assert memory is not None
        self.memory: MemoryDrafter = memory
        self.ended: list[Callable[[], None]] = []
        self.steps: list[StepStats] = []
        self.thread = EngineThread(self.engine, {"observers": self._observe}, self.ended)
        self._answers: dict[str, list[int]] = {}
        self._done = threading.Semaphore(0)

    def start(self) -> None:
        self.thread.start(self._deliver)

    def answer(self, prompt: Sequence[int], scope: str = "a", *, store: bool = True, count: int = 32) -> list[int]:
        name = f"{len(self._answers)}"
        self._answers[name] = []
        asked = replace(request(name, prompt, greedy(count)), scope=Scope(scope), store=store)
        self.thread.submit(Submission([asked]))
        assert self._done.acquire(timeout=PATIENCE_SECONDS)
        return self._answers[name]

    def tree(self, prompt: Sequence[int], scope: str = "a") -> DraftTree:
        """What past answers of the scope propose behind a prompt."""

        def grow() -> DraftTree:
            self.memory.start([DraftContext(row=0, tokens=prompt, scope=scope)])
            tree = self.memory.recall(torch.tensor([0]))
            self.memory.finish([0])
            return DraftTree(*(values.clone() for values in tree))

        return self.between(grow)

    def between(self, call: Callable[[], DraftTree]) -> DraftTree:
        return self.thread.between_steps(call, threading.Event())

    def forget(self, scope: str | None) -> None:
        self.thread.between_steps(lambda: self.memory.forget(scope), threading.Event())

    def _observe(self, report: EngineOutput, load: LoadStats) -> None:
        self.steps += [report.stats] if report.stats is not None else []

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self._answers[output.request_id] += output.token_ids
            if output.finish_reason:
                self._done.release()


@contextmanager
def serving(path: Path, sizes: MemorySizes = SIZES, tokenizer: str = "t", names: bytes = b"n") -> Iterator[Server]:
    """A server that keeps its past answers in a file, which it has read."""
    server = Server(sizes)
    answers = AnswersFile(path, server.memory, tokenizer=tokenizer, names=names)
    file = MemoryFile(answers, server.memory, server.thread)
    server.ended.append(file.finish)
    server.start()
    file.start()
    eventually(lambda: file._is_read)
    try:
        yield server
    finally:
        server.thread.stop()
        assert server.thread.failure is None


def same(one: DraftTree, other: DraftTree) -> bool:
    return all(torch.equal(*both) for both in zip(one, other, strict=True))
