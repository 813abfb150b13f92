"""Queries, versions and weights arrive as they were sent, and nothing else is taken for one."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from torch import Tensor

from adaptation.checkpoint import layout_of
from adaptation.records import Refused
from adaptation.replicas.redis_store import QueryMessage
from adaptation.replicas.wire import QueryCodec, Secret, sign, verify, weights_from_bytes, weights_to_bytes
from adaptation.samples import example_of, training_sample
from drafters.feedback import DraftLabels, QueryFeedback
from drafters.network.checkpoint import VOCABULARY, weights_of
from tests.adaptation.drafts import same
from tests.adaptation.replicas.members import SHAPE
from tests.adaptation.samples import ANSWER, beside_memory, drafter, feedback, sampled
from tests.tiny_models import VOCAB_SIZE

OURS, THEIRS = b"the secret of ours", b"the secret of others"
CONTENT: dict[str, JsonValue] = {"version": 3, "scores": [0.5, 1.5], "name": "ä"}


@contextmanager
def refused(reason: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(Refused, match=match) as refusal:
        yield
    assert refusal.value.reason == reason


@pytest.mark.parametrize("secret", [OURS, None], ids=["secret", "none"])
def test_what_was_signed_is_verified(secret: Secret) -> None:
    assert verify("version", sign("version", CONTENT, secret), secret) == CONTENT


@pytest.mark.parametrize(
    "raw",
    [
        sign("version", CONTENT, THEIRS),
        sign("version", CONTENT, None),
        sign("state", CONTENT, OURS),  # a secret for one kind of thing is none for another
        sign("version", CONTENT, OURS).replace(b"3", b"4", 1),
        b"",
        b"\xff\xfe",
        b"no secret",
    ],
)
def test_without_the_secret_nothing_is_accepted(raw: bytes) -> None:
    with refused("forged"):
        verify("version", raw, OURS)


def test_every_bit_counts_even_without_a_secret() -> None:
    raw = sign("version", CONTENT, None)
    for place in range(1, len(raw)):
        altered = bytearray(raw)
        altered[place] ^= 1
        with refused("torn"):
            verify("version", bytes(altered), None)


def test_equal_weights_are_equal_bytes_in_whatever_order() -> None:
    weights = weights_of(drafter())
    backwards = dict(reversed(weights.items()))
    assert weights_to_bytes(weights) == weights_to_bytes(backwards) == weights_to_bytes(weights_of(drafter()))
    assert weights_to_bytes(weights) != weights_to_bytes(weights_of(drafter(1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_say_of_what_type_they_are(dtype: torch.dtype) -> None:
    weights = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in weights_of(drafter()).items()
    }
    data = weights_to_bytes(weights)
    sha256 = hashlib.sha256(data).hexdigest()
    assert same(weights_from_bytes(data, sha256, layout_of(weights), VOCAB_SIZE), weights)
    others = {name: (shape, torch.float16) for name, (shape, _) in layout_of(weights).items()}
    with refused("misfit", "types"):
        weights_from_bytes(data, sha256, others, VOCAB_SIZE)


def test_bytes_that_are_no_weights_are_refused() -> None:
    for data in (b"", b"no weights at all", bytes(100)):
        with refused("misfit"):
            weights_from_bytes(data, hashlib.sha256(data).hexdigest(), {}, VOCAB_SIZE)


def test_weights_for_tokens_that_there_are_not_are_refused() -> None:
    for place, token in ((0, VOCAB_SIZE), (3, -1), (1, int(drafter().d2t[0]))):
        weights = {name: value.clone() for name, value in weights_of(drafter()).items()}
        weights[VOCABULARY][place] = token
        data = weights_to_bytes(weights)
        with refused("misfit", "tokens"):
            weights_from_bytes(data, hashlib.sha256(data).hexdigest(), layout_of(weights), VOCAB_SIZE)


CODEC = QueryCodec("ours", SHAPE, OURS)
ORIGIN: dict[str, Any] = {"sender": "one", "sequence": 3, "first_weights": "a" * 64, "weights": ""}


def message(made: QueryFeedback | None = None) -> QueryMessage:
    return CODEC.encode(feedback(0) if made is None else made, **ORIGIN)


def with_tensors(changed: dict[str, Tensor]) -> QueryMessage:
    """Signed as by one of us, around other tensors."""
    sent = message()
    tensors = {**safetensors.torch.load(sent.tensors), **changed}
    return resigned(sent, safetensors.torch.save({name: value for name, value in tensors.items() if value.ndim}))


def resigned(sent: QueryMessage, tensors: bytes, **changes: Any) -> QueryMessage:
    content = {**verify("query", sent.header, OURS), "tensors_sha256": hashlib.sha256(tensors).hexdigest(), **changes}
    return QueryMessage(sign("query", content, OURS), tensors)


def reason(received: QueryMessage) -> str:
    with pytest.raises(Refused) as refused:
        CODEC.decode(received)
    return refused.value.reason


def assert_equal(one: QueryFeedback, other: QueryFeedback) -> None:
    assert one.query == other.query
    assert (one.prompt, one.first, one.ready) == (other.prompt, other.first, other.ready)
    for name in ("features", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    for name in DraftLabels.__slots__:
        assert torch.equal(getattr(one.draft_labels, name), getattr(other.draft_labels, name))


def test_a_query_arrives_to_the_bit() -> None:
    made = feedback(4, client="somebody", accepted=(3, 0, 1))
    header, received = CODEC.decode(message(made))
    query = replace(made.query, first_version=-1, version=-1)
    assert_equal(received, replace(made, query=query))
    assert {name: getattr(header, name) for name in ORIGIN} == ORIGIN


def test_of_the_text_only_what_is_learnt_from_travels() -> None:
    made = feedback(0)
    cut = replace(made, first=2, features=made.features[2:])
    _, received = CODEC.decode(message(cut))
    assert received.query.tokens == made.query.tokens[2:]
    assert (received.first, received.prompt) == (0, made.prompt - 2)
    assert torch.equal(received.draft_labels.positions, made.draft_labels.positions - 2)


def test_a_text_of_which_a_part_travels_keeps_the_positions_of_its_noise() -> None:
    """Twice: as from a server to the leader, and on from there."""
    made = sampled(3, answer=ANSWER)
    _, once = CODEC.decode(message(replace(made, first=2, features=made.features[2:])))
    _, twice = CODEC.decode(message(replace(once, first=1, features=once.features[1:])))
    sent, received = (training_sample(one, most_rejected=99) for one in (made, twice))
    for name in ("seeds", "temperatures", "positions"):
        assert torch.equal(getattr(sent.noise, name), getattr(received.noise, name))
    assert received.noise.warm
    assert sent.example is not None
    assert received.example is not None
    assert (received.example.seed, received.example.start) == (3, sent.example.start + 3)


def test_what_a_memory_knew_travels_with_the_text_before_the_window() -> None:
    made = beside_memory(feedback(3))
    made = replace(made, first=2, features=made.features[2:], query=replace(made.query, drafted_nodes=9))
    _, once = CODEC.decode(message(made))
    _, twice = CODEC.decode(message(once))
    unknown = replace(made.query, first_version=twice.query.version, version=twice.query.version)
    assert_equal(twice, replace(made, query=unknown))
    sent, received = example_of(made), example_of(twice)
    assert sent is not None
    assert received is not None
    assert sent.memory is not None
    assert received.memory is not None
    assert sent.memory.nodes == received.memory.nodes == round(9 / 2)
    for name in ("before", "lines", "regression"):
        assert torch.equal(getattr(sent.memory, name), getattr(received.memory, name)), name


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("before", lambda value: value.repeat(9), "misfit"),  # more than the positions before the window
        ("before", lambda value: value + SHAPE.vocab, "misfit"),
        ("past", lambda value: value[1:], "misfit"),
        ("regression", lambda value: value * math.nan, "not_finite"),
        ("regression", lambda value: -value, "misfit"),
        ("regression", lambda value: torch.tensor(0), "misfit"),  # left out
    ],
)
def test_a_memory_that_cannot_be_is_refused(name: str, change: Callable[[Tensor], Tensor], expected: str) -> None:
    made = beside_memory(feedback(0))
    sent = message(replace(made, first=2, features=made.features[2:]))
    tensors = safetensors.torch.load(sent.tensors)
    tensors[name] = change(tensors[name]).contiguous()
    kept = {name: value for name, value in tensors.items() if value.ndim}
    assert reason(resigned(sent, safetensors.torch.save(kept))) == expected


def test_a_query_without_marks_arrives() -> None:
    made = feedback(0)
    none = made.draft_labels.take(torch.zeros(made.draft_labels.count, dtype=torch.bool))
    assert CODEC.decode(message(replace(made, draft_labels=none)))[1].draft_labels.count == 0


def test_numbers_that_are_none_are_not_sent() -> None:
    made = feedback(0)
    with pytest.raises(ValueError, match="JSON"):
        message(replace(made, query=replace(made.query, seconds=math.nan)))


def test_every_altered_bit_of_the_tensors_is_seen() -> None:
    sent = message()
    for place in range(0, len(sent.tensors), 997):
        altered = bytearray(sent.tensors)
        altered[place] ^= 1
        assert reason(QueryMessage(sent.header, bytes(altered))) == "torn"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("tokens", lambda value: value.index_fill(0, torch.tensor([1]), SHAPE.vocab), "misfit"),
        ("tokens", lambda value: value[:-1], "misfit"),
        ("tokens", lambda value: value.long(), "misfit"),
        ("tokens", lambda value: value[:0], "misfit"),
        ("features", lambda value: value[:, :-1], "misfit"),
        ("features", lambda value: value.bfloat16(), "misfit"),
        ("features", lambda value: value * math.inf, "not_finite"),
        ("top_ids", lambda value: value - SHAPE.vocab, "misfit"),
        ("top_logprobs", lambda value: value * math.nan, "not_finite"),
        ("labels.states", lambda value: value * math.nan, "not_finite"),
        ("labels.tokens", lambda value: value + SHAPE.vocab, "misfit"),
        ("labels.positions", lambda value: value + 1, "misfit"),
        ("labels.positions", lambda value: value.flip(0), "misfit"),
        ("labels.rejected", lambda value: value.int(), "misfit"),
        ("labels.rejected", lambda value: torch.tensor(0), "misfit"),  # left out
        ("more", lambda value: torch.zeros(3), "misfit"),
    ],
)
def test_what_cannot_be_is_refused_from_any_sender(
    name: str, change: Callable[[Tensor], Tensor], expected: str
) -> None:
    tensors = safetensors.torch.load(message().tensors)
    value = tensors.get(name, torch.zeros(1))
    assert reason(with_tensors({name: change(value).contiguous()})) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": -1},
        {"prompt": 10**9},
        {"sequence": -1},
        {"drafted_nodes": 10**9},  # a replay would make room for them
        {"temperature": -1.0},
        {"accepted": "many"},
        {"client": 3},
        {"client": "x" * 10_000},
        {"more": 1},
    ],
)
def test_a_header_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    sent = message()
    assert reason(resigned(sent, sent.tensors, **changes)) == "misfit"


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_noise_is_no_query(header: bytes, tensors: bytes) -> None:
    for secret in (OURS, None):
        with pytest.raises(Refused):
            QueryCodec("ours", SHAPE, secret).decode(QueryMessage(header, tensors))


@given(st.binary(max_size=400))
def test_noise_inside_a_signed_envelope_is_no_query(tensors: bytes) -> None:
    assert reason(resigned(message(), tensors)) in ("torn", "misfit")
