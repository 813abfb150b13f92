"""Which version is followed and which is not, and by what hash the weights that are served are known."""

from dataclasses import replace

import pytest

from adaptation.records import Refused
from adaptation.replicas.follower import VersionState
from adaptation.replicas.wire import VersionRecord, sign

OURS = b"the secret of ours"
FIRST = VersionRecord(
    epoch=3,
    number=7,
    sha256="a" * 64,
    parent="b" * 64,
    num_bytes=100,
    fingerprint="ours",
    leader="me",
    date="2026-01-01T00:00:00+00:00",
)


def knowing(*announcements: VersionRecord) -> VersionState:
    state = VersionState("ours", 100, OURS)
    for one in announcements:
        state.accept(one, sign("version", one, OURS))
    return state


def checked(state: VersionState, one: VersionRecord) -> str:
    try:
        return "accepted" if state.check(sign("version", one, OURS)) == one else "altered"
    except Refused as refusal:
        return refusal.reason


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "accepted"),  # the very same again
        ({"number": 8, "parent": "a" * 64}, "accepted"),
        ({"number": 8, "parent": "c" * 64}, "fork"),
        ({"number": 9, "parent": "c" * 64}, "accepted"),  # the one between was not seen
        ({"epoch": 4, "number": 8, "parent": "c" * 64}, "accepted"),
        ({"epoch": 4, "number": 0}, "accepted"),
        ({"sha256": "c" * 64}, "fork"),
        ({"number": 6}, "old"),
        ({"epoch": 2, "number": 90}, "old"),
        ({"epoch": 9, "fingerprint": "theirs"}, "foreign"),
        ({"epoch": 9, "num_bytes": 10**12}, "misfit"),
    ],
)
def test_what_is_followed_and_what_is_not(changes: dict[str, object], verdict: str) -> None:
    assert checked(knowing(FIRST), replace(FIRST, **changes)) == verdict  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [{}, {"epoch": 1}, {"epoch": 0}, {"epoch": 2, "more": 1}])
def test_what_lacks_something_is_torn(content: dict[str, int]) -> None:
    with pytest.raises(Refused) as refused:
        knowing().check(sign("version", content, OURS))
    assert refused.value.reason == "torn"


def test_one_with_a_secret_is_believed_by_one_without() -> None:
    """Until a secret is given to all, those who have none go on."""
    state, raw = VersionState("ours", 100, None), sign("version", FIRST, OURS)
    state.accept(state.check(raw), raw)
    assert state.check(state.raw) == FIRST
