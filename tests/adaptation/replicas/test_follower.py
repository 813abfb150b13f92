"""Which version is followed and which is not, and by what hash the weights that are served are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from adaptation.records import Refused
from adaptation.replicas.follower import ServedWeights, VersionState
from adaptation.replicas.wire import VersionRecord, sign
from drafters.network.checkpoint import weights_of
from tests.adaptation.samples import bench, drafter

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


def test_each_version_is_hashed_once_and_known_by_its_hash(tmp_path: Path) -> None:
    tried = bench(tmp_path)
    served = ServedWeights(tried.weights)
    first = served.now()
    assert served.now() is first
    assert (first.version, served.sha256_of(0), served.version_of(first.sha256)) == (0, first.sha256, 0)
    tried.learner.adopt(weights_of(drafter(1)))
    second = served.now()  # on its way to be served
    assert (second.version, served.last_seen) == (1, second)
    assert served.version_of(first.sha256) == -1
    assert (served.sha256_of(0), served.sha256_of(1), served.sha256_of(7)) == (first.sha256, second.sha256, "")
    tried.learner.rollback()
    assert served.now().sha256 == first.sha256
    assert served.version_of(first.sha256) == 2
