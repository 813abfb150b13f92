"""Wire format between replicas: signed headers, versions, weights as bytes, and finished queries as safetensors.

All received data is checked before use: hash, signature, shapes, types and ranges of numbers. Weights are identified by
hash, since every replica numbers its own versions.
"""

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import safetensors
import safetensors.torch
import torch
from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import to_jsonable_python
from torch import Tensor

from adaptation.checkpoint import Layout, load_tensors, seal, unseal
from adaptation.records import Damaged, RefusalReason, Refused
from adaptation.replicas.redis_store import QueryMessage
from drafters.feedback import DraftLabels, Query, QueryFeedback
from drafters.network.checkpoint import VOCABULARY, names_tokens
from drafters.tree import MAX_NODES
from kernels.memory import FEATURES, ORDERS, WAYS, WEIGHT_SETS

Record = TypeVar("Record")
Kind = Literal["query", "version", "state", "answer"]
Secret = bytes | None
"""Signing key of all replicas. Without one, messages are unsigned, and everything in the store is trusted."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Seconds = Annotated[float, Field(ge=0)]
_BETWEEN = b"\n"
_NO_VERSION = -1
_AS_THEY_ARE = ("client", "scope", "temperature", "seed", "plain_steps", "drafted_nodes", "seconds")
"""Fields of a query that are copied into the header."""


def sign(kind: Kind, content: object, secret: Secret) -> bytes:
    """Encode a mapping or record as sealed JSON, preceded by its HMAC-SHA256 if there is a secret. Raises ValueError
    for numbers that are not finite."""
    data = seal(to_jsonable_python(content))
    return _signature(kind, data, secret) + _BETWEEN + data


def verify(kind: Kind, raw: bytes, secret: Secret) -> dict[str, JsonValue]:
    """Check signature and hash, and decode the content. Raises Refused."""
    shown, _, data = raw.partition(_BETWEEN)
    if secret is not None and not hmac.compare_digest(_signature(kind, data, secret), shown):
        raise Refused("forged", f"the {kind} is not signed with the shared secret")
    try:
        return unseal(data)
    except Damaged as error:
        raise Refused("torn", f"the {kind} is damaged: {error}") from error


def verify_record(
    kind: Kind, form: TypeAdapter[Record], raw: bytes, secret: Secret, *, incomplete: RefusalReason = "torn"
) -> Record:
    """Check and decode a record that `sign` encoded. Raises Refused; for missing or invalid fields, its reason is
    `incomplete`."""
    content = verify(kind, raw, secret)
    try:
        return form.validate_python(content)
    except ValidationError as error:
        raise Refused(incomplete, f"the {kind} has invalid fields: {error.errors()[0]['msg']}") from error


def _signature(kind: Kind, data: bytes, secret: Secret) -> bytes:
    """HMAC over kind and data, so that a message of one kind is not valid as another; empty without a secret."""
    if secret is None:
        return b""
    return hmac.new(secret, kind.encode() + _BETWEEN + data, hashlib.sha256).hexdigest().encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """An announced version. Versions are ordered by epoch, which belongs to one leader, then by number."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    epoch: PositiveInt  # epoch of the leader's lease
    number: NonNegativeInt  # consecutive across leaders
    sha256: Sha256  # hash of the encoded weights
    parent: str  # sha256 of the previous version; empty for the first
    num_bytes: PositiveInt
    fingerprint: str  # hash of target and drafter, which weights must fit
    leader: str
    date: str  # ISO 8601, UTC

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of versions: epoch, number."""
        return self.epoch, self.number

    @staticmethod
    def decode(raw: bytes, secret: Secret) -> "VersionRecord":
        """Check and decode a signed record. Raises Refused."""
        return verify_record("version", _VERSION, raw, secret)


def weights_to_bytes(weights: Mapping[str, Tensor]) -> bytes:
    """Encode weights of any shape [...]; equal weights have equal bytes, and so equal hashes."""
    return safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in weights.items()})


def weights_from_bytes(data: bytes, sha256: str, layout: Layout, vocab: int) -> dict[str, Tensor]:
    """Decode weights with the shapes [...] of `layout`; `vocab`: size of the target's vocabulary. Raises Refused unless
    they have this hash and can be served."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Refused("torn", f"the weights do not match the announced hash {sha256[:16]}")
    weights = load_tensors(data, layout)
    if not names_tokens(weights[VOCABULARY], vocab):
        raise Refused("misfit", "the draft vocabulary of the weights has duplicates, or tokens that the target lacks")
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryShape:
    """Sizes and type that all queries of one target and drafter share."""

    width: int  # features per token
    hidden: int
    top: int
    vocab: int
    most_tokens: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryHeader:
    """The fields of a query that are not tensors."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    sender: Annotated[str, Field(max_length=200)]  # unique per start of a replica
    sequence: NonNegativeInt  # consecutive per sender
    fingerprint: str
    tensors_sha256: str
    first_weights: str  # SHA-256 of the weights in the query's first step; empty: not known
    weights: str  # SHA-256 of the weights in its last step
    client: Annotated[str, Field(max_length=200)]
    temperature: Seconds
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)]
    offset: Annotated[int, Field(ge=0, lt=2**31)]  # absolute position of the first token that is sent
    accepted: list[NonNegativeInt]
    plain_steps: NonNegativeInt
    seconds: Seconds
    prompt: NonNegativeInt
    drafted_nodes: NonNegativeInt = 0  # not sent by replicas of 0.3.0, nor is what a memory knew
    scope: Annotated[str, Field(max_length=200)] = ""  # not sent by replicas of 0.3.0


_VERSION = TypeAdapter(VersionRecord)
_HEADER = TypeAdapter(QueryHeader)


class QueryCodec:
    """Encodes and decodes the queries of one fingerprint. Only the window that is trained on is sent."""

    def __init__(self, fingerprint: str, shape: QueryShape, secret: Secret) -> None:
        self._fingerprint = fingerprint
        self.shape = shape
        self._secret = secret

    def encode(
        self, feedback: QueryFeedback, *, sender: str, sequence: int, first_weights: str, weights: str
    ) -> QueryMessage:
        """Encode and sign a query. Raises ValueError for numbers that are not finite."""
        if feedback.ready is not None:
            feedback.ready.synchronize()
        query = feedback.query
        tensors = safetensors.torch.save(_tensors(feedback))
        header = QueryHeader(
            sender=sender,
            sequence=sequence,
            fingerprint=self._fingerprint,
            tensors_sha256=hashlib.sha256(tensors).hexdigest(),
            first_weights=first_weights,
            weights=weights,
            accepted=list(query.accepted),
            offset=query.offset + feedback.first,
            prompt=feedback.prompt - feedback.first,
            **{name: getattr(query, name) for name in _AS_THEY_ARE},
        )
        return QueryMessage(sign("query", header, self._secret), tensors)

    def decode(
        self, message: QueryMessage, version_of: Callable[[str], int] = lambda sha256: _NO_VERSION
    ) -> tuple[QueryHeader, QueryFeedback]:
        """Check and decode a query. `version_of`: returns this process's version of the weights with a hash. Raises
        Refused."""
        header = self._header(message)
        try:
            tensors = safetensors.torch.load(message.tensors)
        except safetensors.SafetensorError as error:
            raise Refused("torn", f"the tensors of the query cannot be decoded: {error}") from error
        _check(tensors, header, self.shape)
        return header, _feedback(header, tensors, version_of)

    def _header(self, message: QueryMessage) -> QueryHeader:
        header = verify_record("query", _HEADER, message.header, self._secret, incomplete="misfit")
        if header.fingerprint != self._fingerprint:
            raise Refused("foreign", f"the query has another fingerprint: {header.fingerprint[:16]}")
        if hashlib.sha256(message.tensors).hexdigest() != header.tensors_sha256:
            raise Refused("torn", "the tensors of the query do not match the hash in its header")
        return header


def _tensors(feedback: QueryFeedback) -> dict[str, Tensor]:
    first = feedback.first
    labels = feedback.draft_labels
    named = {
        "tokens": torch.tensor(feedback.query.tokens[first:], dtype=torch.int32),
        "features": feedback.features,
        "top_ids": feedback.top_ids,
        "top_logprobs": feedback.top_logprobs,
        **{f"labels.{name}": getattr(labels, name) for name in DraftLabels.__slots__},
        "labels.positions": labels.positions - first,
    }
    if feedback.past is not None and feedback.regression is not None:
        before = torch.tensor(feedback.query.tokens[:first], dtype=torch.int32)
        named |= {"before": before, "past": feedback.past, "regression": feedback.regression}
    # Copies, because safetensors refuses tensors that share memory.
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in named.items()}


def _check(tensors: dict[str, Tensor], header: QueryHeader, shape: QueryShape) -> None:
    """Check names, shapes, types, ids and numbers of a query's tensors. Raises Refused."""
    length, prompt = tensors["tokens"].numel() if "tokens" in tensors else 0, header.prompt
    labels = tensors["labels.positions"].numel() if "labels.positions" in tensors else 0
    if not (2 <= length <= shape.most_tokens and prompt <= length and labels <= length - prompt):
        raise Refused("misfit", f"impossible query of {length} tokens, {prompt} of the prompt, {labels} labels")
    answer, top, ids, number = length - prompt, shape.top, range(shape.vocab), None
    expected: dict[str, tuple[tuple[int, ...], torch.dtype, range | None]] = {
        "tokens": ((length,), torch.int32, ids),
        "features": ((length - 1, shape.width), shape.dtype, number),
        "top_ids": ((answer, top), torch.int32, ids),
        "top_logprobs": ((answer, top), torch.float16, number),
        "labels.positions": ((labels,), torch.int64, range(prompt, length)),
        "labels.states": ((labels, shape.hidden), shape.dtype, number),
        "labels.tokens": ((labels,), torch.int64, ids),
        "labels.chances": ((labels,), torch.float32, number),
        "labels.rejected": ((labels,), torch.bool, range(2)),
        "labels.top_ids": ((labels, top), torch.int32, ids),
        "labels.top_logprobs": ((labels, top), torch.float16, number),
    }
    if header.drafted_nodes > MAX_NODES * len(header.accepted):
        raise Refused("misfit", f"{header.drafted_nodes} nodes in {len(header.accepted)} drafts")
    if "past" in tensors:
        before = min(header.offset, tensors["before"].numel() if "before" in tensors else 0)
        expected |= {
            "before": ((before,), torch.int32, ids),
            "past": ((answer, len(ORDERS), WAYS), torch.int64, None),
            "regression": ((2, WEIGHT_SETS, FEATURES), torch.float32, number),
        }
    for name in sorted({*tensors, *expected}):
        found = (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else None
        if name not in expected or found != expected[name][:2]:
            raise Refused("misfit", f"{name} of the query is {found}, not {expected.get(name, (None,))[:2]}")
    for name, (_, _, allowed) in expected.items():
        value = tensors[name]
        if allowed is not None and not bool(((value >= allowed.start) & (value < allowed.stop)).all()):
            raise Refused("misfit", f"{name} of the query has values outside {allowed.start} to {allowed.stop - 1}")
        not_finite = torch.isnan if name.endswith("logprobs") else lambda value: ~torch.isfinite(value)
        if bool(not_finite(value).any()):
            raise Refused("not_finite", f"{name} of the query")
    if "past" in tensors and not bool((tensors["regression"][1] > 0).all()):
        raise Refused("misfit", "sums of squares of the query's memory are not positive")
    if not bool((tensors["labels.positions"].diff() > 0).all()):
        raise Refused("misfit", "draft labels of the query are not in the order of its text")


def _feedback(header: QueryHeader, tensors: dict[str, Tensor], version_of: Callable[[str], int]) -> QueryFeedback:
    before = tensors["before"].tolist() if "before" in tensors else []
    first, labels = len(before), {name: tensors[f"labels.{name}"] for name in DraftLabels.__slots__}
    query = Query(
        row=0,
        tokens=before + tensors["tokens"].tolist(),
        offset=header.offset - first,
        num_prompt=first + header.prompt,
        store=True,
        first_version=version_of(header.first_weights),
        version=version_of(header.weights),
        accepted=tuple(header.accepted),
        **{name: getattr(header, name) for name in _AS_THEY_ARE},
    )
    return QueryFeedback(
        query=query,
        prompt=first + header.prompt,
        first=first,
        features=tensors["features"],
        top_ids=tensors["top_ids"],
        top_logprobs=tensors["top_logprobs"],
        draft_labels=DraftLabels(**(labels | {"positions": labels["positions"] + first})),
        ready=None,
        past=tensors.get("past"),
        regression=tensors.get("regression"),
    )
