from dataclasses import replace

import pytest

from adaptation.records import Refused
from adaptation.replicas.announcement import Announcement, read, written
from adaptation.replicas.belief import Belief
from adaptation.replicas.signature import NoSecret, SharedSecret, signed

OURS = SharedSecret("the secret of ours")
FIRST = Announcement(
    epoch=3,
    number=7,
    sha256="a" * 64,
    parent="b" * 64,
    num_bytes=100,
    fingerprint="ours",
    leader="me",
    date="2026-01-01T00:00:00+00:00",
)


def believing(*announcements: Announcement) -> Belief:
    belief = Belief("ours", 100, OURS)
    for one in announcements:
        belief.make(one)
    return belief


def judged(belief: Belief, one: Announcement) -> str:
    try:
        return "accepted" if belief.judge(written(one, OURS)) == one else "altered"
    except Refused as refusal:
        return refusal.reason


def test_it_is_read_as_it_was_written() -> None:
    assert read(written(FIRST, OURS), OURS) == FIRST


def test_nothing_is_known_at_first() -> None:
    belief = believing()
    assert (belief.known, belief.raw, belief.epoch, belief.next_number, belief.sha256) == (None, b"", 0, 0, "")
    assert judged(belief, FIRST) == "accepted"


def test_what_was_accepted_is_known() -> None:
    belief = believing(FIRST)
    assert (belief.known, belief.epoch, belief.next_number, belief.sha256) == (FIRST, 3, 8, "a" * 64)
    assert belief.raw == written(FIRST, OURS)


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
    assert judged(believing(FIRST), replace(FIRST, **changes)) == verdict  # type: ignore[arg-type]


def test_what_others_have_signed_is_forged() -> None:
    for signature in (NoSecret(), SharedSecret("the secret of others")):
        with pytest.raises(Refused) as refused:
            believing().judge(written(FIRST, signature))
        assert refused.value.reason == "forged"


@pytest.mark.parametrize("content", [{}, {"epoch": 1}, {"epoch": 0}, {"epoch": 2, "more": 1}])
def test_what_lacks_something_is_torn(content: dict[str, int]) -> None:
    with pytest.raises(Refused) as refused:
        believing().judge(signed("version", content, OURS))
    assert refused.value.reason == "torn"


def test_one_with_a_secret_is_believed_by_one_without() -> None:
    """Until a secret is given to all, those who have none go on."""
    belief, raw = Belief("ours", 100, NoSecret()), written(FIRST, OURS)
    belief.accept(belief.judge(raw), raw)
    assert belief.judge(belief.raw) == FIRST
