"""Steps grow while candidates are published, shrink while they are clearly worse, and stay within bounds."""

import pytest

from adaptation.policy import ARMS, Arm
from adaptation.trainer import Pace


def test_it_begins_carefully_and_is_bold_when_traffic_has_changed() -> None:
    pace = Pace()
    assert [pace.share(arm) for arm in ARMS] == [0.5, 0.5]
    pace.traffic_changed()
    assert [pace.share(arm) for arm in ARMS] == [1.0, 1.0]


@pytest.mark.parametrize(("arm", "other"), [("head", "full"), ("full", "head")])
def test_each_arm_has_its_own_within_bounds(arm: Arm, other: Arm) -> None:
    pace = Pace()
    seen = [pace.share(arm)]
    for _ in range(10):
        pace.clearly_worse(arm)
        seen.append(pace.share(arm))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0.25
    for _ in range(10):
        pace.published(arm)
    assert (pace.share(arm), pace.share(other)) == (1.0, 0.5)
