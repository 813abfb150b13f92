"""A finished query as a letter, and back: a signed header of plain values, and tensors as safetensors.

What arrives is checked before anybody learns from it: whole, from one of us, of the shapes that the drafter has, and
all numbers in their range. Of the text only the stretch that is learnt from travels. Weights are named by hash, since
every replica counts versions for itself.
"""

import hashlib
from dataclasses import dataclass
from typing import Annotated

import safetensors
import safetensors.torch
import torch
from pydantic import ConfigDict, Field, JsonValue, NonNegativeInt, TypeAdapter, ValidationError
from torch import Tensor

from adaptation.records import Refused
from adaptation.replicas.signature import Signature, opened, signed
from adaptation.replicas.stream import Letter
from drafters.feedback import DraftLabels, Query, QueryFeedback

Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryShape:
    """What queries of one target and drafter have in common."""

    width: int  # of features
    hidden: int
    top: int
    vocab: int
    most_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What stands beside the tensors of a query."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    sender: Annotated[str, Field(max_length=200)]  # a replica and its start
    sequence: NonNegativeInt  # counts what the sender sends
    fingerprint: str
    tensors_sha256: str
    first_weights: str  # sha256 of what served the query's first step; empty: not known
    weights: str  # and its last
    client: Annotated[str, Field(max_length=200)]
    temperature: Seconds
    accepted: list[NonNegativeInt]
    plain_steps: NonNegativeInt
    draft_cost: Seconds
    verify_cost: Seconds
    seconds: Seconds
    prompt: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who sends a query, and what served it."""

    sender: str
    sequence: int
    first_weights: str
    weights: str


@dataclass(frozen=True, slots=True)
class Received:
    """A query of another replica. Its versions are not set: they are told by `origin`."""

    origin: Origin
    feedback: QueryFeedback


_HEADER = TypeAdapter(Header)
_NO_VERSION = -1


class Wire:
    """Writes and reads letters of one fingerprint."""

    def __init__(self, fingerprint: str, shape: QueryShape, signature: Signature) -> None:
        self._fingerprint = fingerprint
        self._shape = shape
        self._signature = signature

    def written(self, feedback: QueryFeedback, origin: Origin) -> Letter:
        """Raises ValueError for a query whose numbers are none."""
        if feedback.ready is not None:
            feedback.ready.synchronize()
        query, first = feedback.query, feedback.first
        tensors = safetensors.torch.save(_tensors(feedback))
        header = Header(
            sender=origin.sender,
            sequence=origin.sequence,
            fingerprint=self._fingerprint,
            tensors_sha256=hashlib.sha256(tensors).hexdigest(),
            first_weights=origin.first_weights,
            weights=origin.weights,
            client=query.client,
            temperature=query.temperature,
            accepted=list(query.accepted),
            plain_steps=query.plain_steps,
            draft_cost=query.draft_cost,
            verify_cost=query.verify_cost,
            seconds=query.seconds,
            prompt=feedback.prompt - first,
        )
        content: dict[str, JsonValue] = _HEADER.dump_python(header, mode="json")
        return Letter(signed("query", content, self._signature), tensors)

    def read(self, letter: Letter) -> Received:
        """Raises Refused."""
        header = self._header(letter)
        tensors = _loaded(letter.tensors)
        _check_layout(tensors, header.prompt, self._shape)
        _check_numbers(tensors, header.prompt, self._shape)
        origin = Origin(
            sender=header.sender,
            sequence=header.sequence,
            first_weights=header.first_weights,
            weights=header.weights,
        )
        return Received(origin, _feedback(header, tensors))

    def _header(self, letter: Letter) -> Header:
        content = opened("query", letter.header, self._signature)
        try:
            header = _HEADER.validate_python(content)
        except ValidationError as error:
            raise Refused("misfit", f"a query's header: {error.errors()[0]['msg']}") from error
        if header.fingerprint != self._fingerprint:
            raise Refused("foreign", f"a query of fingerprint {header.fingerprint[:16]}")
        if hashlib.sha256(letter.tensors).hexdigest() != header.tensors_sha256:
            raise Refused("torn", "a query whose tensors do not have the hash that its header says")
        return header


def _tensors(feedback: QueryFeedback) -> dict[str, Tensor]:
    first = feedback.first
    draft_labels = feedback.draft_labels
    named = {
        "tokens": torch.tensor(feedback.query.tokens[first:], dtype=torch.int32),
        "features": feedback.features,
        "top_ids": feedback.top_ids,
        "top_logprobs": feedback.top_logprobs,
        **{f"marks.{name}": getattr(draft_labels, name) for name in DraftLabels.__slots__},
        "marks.positions": draft_labels.positions - first,
    }
    # Copies, because safetensors takes no two tensors that share memory.
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in named.items()}


def _loaded(data: bytes) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise Refused("torn", f"a query that holds no tensors: {error}") from error


def _check_layout(tensors: dict[str, Tensor], prompt: int, shape: QueryShape) -> None:
    """Names, shapes and types are the ones there must be."""
    length = tensors["tokens"].numel() if "tokens" in tensors else 0
    draft_labels = tensors["marks.positions"].numel() if "marks.positions" in tensors else 0
    if not (2 <= length <= shape.most_tokens and prompt <= length and draft_labels <= length - prompt):
        raise Refused("misfit", f"a query of {length} tokens, {prompt} of them a prompt, and {draft_labels} labels")
    labels = length - prompt
    expected = {
        "tokens": ((length,), torch.int32),
        "features": ((length - 1, shape.width), shape.dtype),
        "top_ids": ((labels, shape.top), torch.int32),
        "top_logprobs": ((labels, shape.top), torch.float16),
        "marks.positions": ((draft_labels,), torch.int64),
        "marks.states": ((draft_labels, shape.hidden), shape.dtype),
        "marks.tokens": ((draft_labels,), torch.int64),
        "marks.chances": ((draft_labels,), torch.float32),
        "marks.rejected": ((draft_labels,), torch.bool),
        "marks.top_ids": ((draft_labels, shape.top), torch.int32),
        "marks.top_logprobs": ((draft_labels, shape.top), torch.float16),
    }
    found = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        raise Refused("misfit", f"a query's {wrong[0]} is {found.get(wrong[0])}, not {expected.get(wrong[0])}")


def _check_numbers(tensors: dict[str, Tensor], prompt: int, shape: QueryShape) -> None:
    """Ids are ids of something, and numbers are numbers."""
    length = tensors["tokens"].numel()
    bounds = {
        "tokens": (0, shape.vocab),
        "top_ids": (0, shape.vocab),
        "marks.top_ids": (0, shape.vocab),
        "marks.tokens": (0, shape.vocab),
        "marks.positions": (prompt, length),
    }
    for name, (lowest, end) in bounds.items():
        if not bool(((tensors[name] >= lowest) & (tensors[name] < end)).all()):
            raise Refused("misfit", f"a query's {name} are not all from {lowest} to {end - 1}")
    if not bool((tensors["marks.positions"].diff() > 0).all()):
        raise Refused("misfit", "a query's draft labels are not in the order of its text")
    for name in ("features", "marks.states", "marks.chances"):
        if not bool(torch.isfinite(tensors[name]).all()):
            raise Refused("not_finite", f"a query's {name}")
    if any(bool(torch.isnan(tensors[name]).any()) for name in ("top_logprobs", "marks.top_logprobs")):
        raise Refused("not_finite", "a query's log-probabilities")


def _feedback(header: Header, tensors: dict[str, Tensor]) -> QueryFeedback:
    query = Query(
        row=0,
        tokens=tensors["tokens"].tolist(),
        num_prompt=header.prompt,
        client=header.client,
        store=True,
        temperature=header.temperature,
        first_version=_NO_VERSION,
        version=_NO_VERSION,
        accepted=tuple(header.accepted),
        plain_steps=header.plain_steps,
        draft_cost=header.draft_cost,
        verify_cost=header.verify_cost,
        seconds=header.seconds,
    )
    return QueryFeedback(
        query=query,
        prompt=header.prompt,
        first=0,
        features=tensors["features"],
        top_ids=tensors["top_ids"],
        top_logprobs=tensors["top_logprobs"],
        draft_labels=DraftLabels(*(tensors[f"marks.{name}"] for name in DraftLabels.__slots__)),
        ready=None,
    )
