"""The texts that full updates train on: as many as fit into bounded memory, the most valuable ones, in passes.

    value of a text = number of its labels * its steps / its tokens

Each step emits one token that no draft had right, so the second factor is the share of tokens that were missed.

The operator may name a file that keeps them over restarts, with the target's features:

    a line of JSON, then per text: a line of JSON, tensors as safetensors | keyed hash of everything before it
"""

import heapq
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from adaptation.records import NotStored
from drafters.feedback import Query
from drafters.files import KeyedFile, create_private, replacing
from drafters.training.corpus import Example

PROMPT = 16
"""Prompt tokens trained on: all 35 of German texts make an update an eighth dearer, and teach nothing more."""
_FORMAT = 1
_BYTES_PER_SECOND = 1 << 20  # average rate of writing, as of past answers
_LEAST_PAUSE_SECONDS = 180.0
_SCALARS = "prompt", "temperature", "seed", "start"  # fields of an example
_FIELDS = "scope", "client", "value", "passes"  # of a kept text


@dataclass(eq=False, slots=True, kw_only=True)
class KeptText:
    """A text of the replay buffer."""

    example: Example
    scope: str  # namespace of the past answers that it belongs to
    client: str
    value: float
    passes: int = 0  # passes in which it was trained on


class ReplayFile(KeyedFile):
    """Writes, verifies and reads the file. Only the learning thread writes."""

    def __init__(self, path: Path, key: bytes, belongs_to: Mapping[str, str]) -> None:
        """`belongs_to`: hashes of what the texts can be used with, by its name in messages."""
        super().__init__(path, key, {"format": _FORMAT, **belongs_to}, kind="texts to train on")
        self._written = 0  # `ReplayBuffer.num_changes` of what is in the file
        self._rests_until = 0.0

    def is_due(self, num_changes: int, *, at_end: bool = False) -> bool:
        """Whether there are changes to write, and not too soon after the last ones; `at_end`: at once."""
        return num_changes != self._written and (at_end or time.monotonic() >= self._rests_until)

    def write(self, texts: Sequence[KeptText], num_changes: int, *, forgot: bool = False) -> None:
        """Replace the file atomically. Raises NotStored; then the old file stays, or is removed if `forgot`, since it
        may still hold forgotten texts."""
        began = time.monotonic()
        self._rests_until = began + _LEAST_PAUSE_SECONDS  # also after a failure
        try:
            with replacing(self.path) as unfinished, create_private(unfinished) as file:
                mac = self.hash()
                for data in itertools.chain([self.first_line], map(_encoded, texts)):
                    file.write(data)
                    mac.update(data)
                file.write(mac.digest())
                size = file.tell()
        except OSError as error:
            if forgot:
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)
            raise NotStored(f"the replay buffer could not be stored in {self.path}: {error}") from error
        self._written = num_changes
        self._rests_until = began + max(_LEAST_PAUSE_SECONDS, size / _BYTES_PER_SECOND)

    def read(self) -> list[KeptText]:
        """Read the texts, none if there is no file. Raises ValueError for a file that is not this server's."""
        try:
            with self.path.open("rb") as file:
                end, texts = self.check(file), []
                while file.tell() < end:
                    fields = json.loads(file.readline())
                    texts.append(_decoded(fields, file.read(fields.pop("num_bytes"))))
                return texts
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise ValueError(
                f"adaptation.replay_file: {self.path} cannot be used: {error}; name another file, or remove this one"
            ) from error


class ReplayBuffer:
    """Keeps at most `max_bytes` of texts, in the host's memory. A pass trains on every text once, the most valuable
    first; a new text joins the pass under way.

    When the buffer is full, the text of least value is dropped, the oldest among equals: of a client with more than its
    share, if there is one, since texts that no drafter knows are the most valuable.
    """

    def __init__(self, max_bytes: int, *, client_share: float) -> None:
        self.num_bytes = self.num_added = 0
        self.num_changes = 0  # a file with an earlier number is out of date
        self.file: ReplayFile | None = None
        self._max_bytes = max_bytes
        self._client_share = client_share
        self._texts: dict[int, KeptText] = {}  # by id of the example, the oldest first
        self._bytes_of = Counter[str]()  # by client, none of them 0
        self._taken: list[KeptText] = []  # by the update under way, or the last one

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def texts(self) -> Sequence[KeptText]:
        """All texts, the oldest first."""
        return tuple(self._texts.values())

    def add(self, example: Example, query: Query) -> Example:
        """Add a query's text. Returns it as it is kept, cut to what updates train on."""
        missed = min(1.0, query.num_steps / max(1, len(query.answer)))
        kept = compact(example)
        passes = min((text.passes for text in self._texts.values()), default=0)
        value = missed * kept.top_ids.shape[0]
        self.restore([KeptText(example=kept, scope=query.scope, client=query.client, value=value, passes=passes)])
        self.num_added += 1
        return kept

    def restore(self, texts: Iterable[KeptText]) -> None:
        """Add texts as they are."""
        for text in texts:
            self._texts[id(text.example)] = text
            self._count_bytes(text.client, num_bytes(text.example))
            while self.num_bytes > self._max_bytes:
                self._remove(self._worst())

    def take(self, count: int, *, new: Sequence[Example] = ()) -> list[Example]:
        """Take the next texts of the pass, so that there are `count` together with the `new` ones of this update. They
        count as trained on unless they are returned."""
        known = [self._texts[id(example)] for example in new if id(example) in self._texts]
        others = (text for text in self._texts.values() if text not in known)
        taken = heapq.nsmallest(count - len(new), others, key=lambda text: (text.passes, -text.value))
        self._taken = known + taken
        self._count_passes(1)
        return [text.example for text in taken]

    def put_back(self) -> None:
        """Return the texts of the last `take`: their update was interrupted."""
        self._count_passes(-1)
        self._taken = []

    def drop_taken(self) -> None:
        """Drop the texts of the last `take`: their update broke."""
        for text in self._taken:
            self._remove(text)
        self._taken = []

    def forget(self, scope: str | None) -> None:
        """Drop the texts of a scope, or of all scopes if it is None."""
        for text in self.texts:
            if scope in (None, text.scope):
                self._remove(text)
        self._taken = []

    def keep(self, *, forgot: bool = False, at_end: bool = False) -> None:
        """Write the texts to the file, if there is one: at once if some were forgotten or `at_end`, else now and then.
        Raises NotStored."""
        if self.file is not None and (forgot or self.file.is_due(self.num_changes, at_end=at_end)):
            self.file.write(self.texts, self.num_changes, forgot=forgot)

    def _count_passes(self, change: int) -> None:
        for text in self._taken:
            text.passes += change
        self.num_changes += 1

    def _worst(self) -> KeptText:
        most = max(self._client_share, 1 / len(self._bytes_of)) * self.num_bytes * (1 + 1e-9)  # a sum may be rounded
        greedy = {client for client, size in self._bytes_of.items() if size > most} or self._bytes_of.keys()
        return min((text for text in self._texts.values() if text.client in greedy), key=lambda text: text.value)

    def _remove(self, text: KeptText) -> None:
        if self._texts.pop(id(text.example), None) is not None:
            self._count_bytes(text.client, -num_bytes(text.example))

    def _count_bytes(self, client: str, change: int) -> None:
        self.num_bytes += change
        self.num_changes += 1
        self._bytes_of[client] += change
        if not self._bytes_of[client]:
            del self._bytes_of[client]


def tensors_of(example: Example) -> dict[str, Tensor]:
    """Return the tensors that updates need, by name; shapes [...] as in `Example`. What a memory drafter knew is needed
    only to judge."""
    values = {field.name: getattr(example, field.name) for field in fields(example)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def num_bytes(example: Example) -> int:
    """Bytes of the tensors that are kept of a text."""
    return sum(tensor.nbytes for tensor in tensors_of(example).values())


def compact(example: Example) -> Example:
    """Return a text cut to what updates train on, as copies in the host's memory and types as they come."""
    cut = example.within(example.length - example.prompt + PROMPT)
    copies: dict[str, Any] = {name: value.to("cpu", copy=True) for name, value in tensors_of(cut).items()}
    return replace(cut, memory=None, **copies)


def _encoded(text: KeptText) -> bytes:
    tensors = safetensors.torch.save({name: value.contiguous() for name, value in tensors_of(text.example).items()})
    fields = {name: getattr(text, name) for name in _FIELDS}
    scalars = {name: getattr(text.example, name) for name in _SCALARS}
    line = json.dumps({**fields, "example": scalars, "num_bytes": len(tensors)})
    return line.encode() + b"\n" + tensors


def _decoded(fields: dict[str, Any], tensors: bytes) -> KeptText:
    given: dict[str, Any] = {**safetensors.torch.load(tensors), **fields.pop("example")}
    return KeptText(example=Example(**given), **fields)
