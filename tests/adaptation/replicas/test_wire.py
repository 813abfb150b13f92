"""Queries arrive as they were sent, and nothing else is taken for one."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adaptation.records import Refused
from adaptation.replicas.signature import NoSecret, SharedSecret, opened, signed
from adaptation.replicas.stream import Letter
from adaptation.replicas.wire import Origin, Wire
from drafters.feedback import DraftLabels, QueryFeedback
from tests.adaptation.replicas.members import SHAPE
from tests.adaptation.samples import feedback

OURS = SharedSecret("the secret of ours")
WIRE = Wire("ours", SHAPE, OURS)
ORIGIN = Origin(sender="one", sequence=3, first_weights="a" * 64, weights="")


def letter(made: QueryFeedback | None = None) -> Letter:
    return WIRE.written(feedback(0) if made is None else made, ORIGIN)


def with_tensors(changed: dict[str, Tensor]) -> Letter:
    """Signed as by one of us, around other tensors."""
    sent = letter()
    tensors = {**safetensors.torch.load(sent.tensors), **changed}
    return resigned(sent, safetensors.torch.save({name: value for name, value in tensors.items() if value.ndim}))


def resigned(sent: Letter, tensors: bytes, **changes: Any) -> Letter:
    content = {**opened("query", sent.header, OURS), "tensors_sha256": hashlib.sha256(tensors).hexdigest(), **changes}
    return Letter(signed("query", content, OURS), tensors)


def reason(received: Letter) -> str:
    with pytest.raises(Refused) as refused:
        WIRE.read(received)
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
    received = WIRE.read(letter(made))
    query = replace(made.query, first_version=-1, version=-1)
    assert_equal(received.feedback, replace(made, query=query))
    assert received.origin == ORIGIN


def test_of_the_text_only_what_is_learnt_from_travels() -> None:
    made = feedback(0)
    cut = replace(made, first=2, features=made.features[2:])
    received = WIRE.read(letter(cut)).feedback
    assert received.query.tokens == made.query.tokens[2:]
    assert (received.first, received.prompt) == (0, made.prompt - 2)
    assert torch.equal(received.draft_labels.positions, made.draft_labels.positions - 2)


def test_a_query_without_marks_arrives() -> None:
    made = feedback(0)
    none = made.draft_labels.take(torch.zeros(made.draft_labels.count, dtype=torch.bool))
    assert WIRE.read(letter(replace(made, draft_labels=none))).feedback.draft_labels.count == 0


def test_numbers_that_are_none_are_not_sent() -> None:
    made = feedback(0)
    with pytest.raises(ValueError, match="JSON"):
        letter(replace(made, query=replace(made.query, seconds=math.nan)))


def test_others_are_not_heard() -> None:
    assert reason(Wire("ours", SHAPE, NoSecret()).written(feedback(0), ORIGIN)) == "forged"
    assert reason(Wire("theirs", SHAPE, OURS).written(feedback(0), ORIGIN)) == "foreign"


def test_every_altered_bit_of_the_tensors_is_seen() -> None:
    sent = letter()
    for place in range(0, len(sent.tensors), 997):
        altered = bytearray(sent.tensors)
        altered[place] ^= 1
        assert reason(Letter(sent.header, bytes(altered))) == "torn"


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
        ("marks.states", lambda value: value * math.nan, "not_finite"),
        ("marks.tokens", lambda value: value + SHAPE.vocab, "misfit"),
        ("marks.positions", lambda value: value + 1, "misfit"),
        ("marks.positions", lambda value: value.flip(0), "misfit"),
        ("marks.rejected", lambda value: value.int(), "misfit"),
        ("marks.rejected", lambda value: torch.tensor(0), "misfit"),  # left out
        ("more", lambda value: torch.zeros(3), "misfit"),
    ],
)
def test_what_cannot_be_is_refused_whoever_sends_it(
    name: str, change: Callable[[Tensor], Tensor], expected: str
) -> None:
    tensors = safetensors.torch.load(letter().tensors)
    value = tensors.get(name, torch.zeros(1))
    assert reason(with_tensors({name: change(value).contiguous()})) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": -1},
        {"prompt": 10**9},
        {"sequence": -1},
        {"temperature": -1.0},
        {"accepted": "many"},
        {"client": 3},
        {"client": "x" * 10_000},
        {"more": 1},
    ],
)
def test_a_header_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    sent = letter()
    assert reason(resigned(sent, sent.tensors, **changes)) == "misfit"


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_noise_is_no_query(header: bytes, tensors: bytes) -> None:
    for signature in (OURS, NoSecret()):
        with pytest.raises(Refused):
            Wire("ours", SHAPE, signature).read(Letter(header, tensors))


@given(st.binary(max_size=400))
def test_noise_inside_a_signed_envelope_is_no_query(tensors: bytes) -> None:
    assert reason(resigned(letter(), tensors)) in ("torn", "misfit")
