"""What loading a model brings about, as the runtime sees it: an engine, a tokenizer, a card, and learning if it is on.

Protocols and records only. Both engine and learning run in threads of their own and may be called from any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adaptation.status import AdaptationStatus
from service.engine.requests import GenerationRequest, SequenceOutput
from service.tokenizer import ChatTokenizer


class EngineHandle(Protocol):
    """What the bridge asks of an engine; everything may be called from any thread."""

    def start(self, deliver: Callable[[list[SequenceOutput]], None]) -> None:
        """Begin to run; `deliver` is called from the engine's thread, once per step."""
        ...

    def submit(self, request: GenerationRequest) -> None: ...

    def abort(self, request_id: str) -> None:
        """Free what the request holds within one step; nothing more is delivered for it. Unknown ids are ignored."""
        ...

    def wake(self) -> None:
        """Make an idle engine step once, so that new weights need not wait for a request."""
        ...

    def drain(self) -> None:
        """Finish what runs."""
        ...

    def stop(self) -> None:
        """End the thread; what still runs is given up. Harmless when repeated."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread ended by itself."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...


class AdaptationControl(Protocol):
    """What the server asks of learning. May be called from any thread, and may wait for an update under way."""

    def start(self, wake: Callable[[], None]) -> None:
        """Begin to learn; `wake` is called when weights wait for the engine."""
        ...

    def stop(self) -> None:
        """End learning and keep its state."""
        ...

    def status(self) -> AdaptationStatus: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def rollback(self) -> int:
        """Serve what was served before. # -> the version of the drafter"""
        ...

    def load_from_disk(self, folder: Path) -> int:
        """Serve the drafter in this folder. # -> its version

        Raises ValueError naming what is wrong with it, or AdaptationError when it cannot be kept.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What clients may know of the model that is served."""

    name: str
    created: int  # seconds since the epoch
    max_model_len: int
    system_fingerprint: str
    drafter: str
    numerics: str
    vocab_size: int
    num_spec_tokens: int  # longest path that a step can accept
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Served:
    """What loading brings about."""

    engine: EngineHandle
    tokenizer: ChatTokenizer
    card: ModelCard
    adaptation: AdaptationControl | None = None
