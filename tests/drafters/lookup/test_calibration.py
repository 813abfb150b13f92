"""Equal beginnings are one node, and more evidence never lowers its rate."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookup.calibration import ABSENT, LookupCalibration, MergedTree, Merger
from drafters.lookup.matching import NUM_STRENGTHS, PREDICTED, REACH, SEPARATOR, Matches
from drafters.tree import ROOT

MATCHES = 6

matches = st.tuples(
    st.lists(
        st.lists(st.integers(0, 1), max_size=4).map(lambda tokens: tokens + [SEPARATOR] * (REACH + 1 - len(tokens))),
        min_size=MATCHES,
        max_size=MATCHES,
    ),
    st.lists(st.integers(1, 16), min_size=MATCHES, max_size=MATCHES).map(lambda s: sorted(s, reverse=True)),
)


@given(matches)
def test_merging_agrees_with_comparing_beginnings(case: tuple[list[list[int]], list[int]]) -> None:
    texts, strengths = case
    given_matches = Matches(torch.zeros(1, MATCHES), torch.tensor([strengths]), torch.tensor([texts]).mT)
    tree = Merger(MATCHES, device="cpu").merge(given_matches)
    weights = [2.0**s * 0.8**i for i, s in enumerate(strengths)]
    for d in range(4):
        for i, text in enumerate(texts):
            behind = [j for j in range(MATCHES) if texts[j][: d + 1] == text[: d + 1]]
            behind_parent = [j for j in range(MATCHES) if texts[j][:d] == text[:d]]
            assert bool(tree.absent[0, d, i]) == (behind[0] != i or text[d] == SEPARATOR)
            assert tree.votes[0, d, i] == len(behind)
            assert tree.parents[0, d, i] == (ROOT if d == 0 else (d - 1) * MATCHES + behind_parent[0])
            share = sum(weights[j] for j in behind) / sum(weights[j] for j in behind_parent)
            assert abs(float(tree.share[0, d, i]) - share) < 1e-5


def prior(strength: int, share: float, votes: int, temperature: float = 0.0) -> torch.Tensor:
    """Prior rates along a chain with this evidence. # [depth]"""
    matches = Matches(torch.zeros(1, 1), torch.tensor([[strength]]), torch.zeros(1, REACH, 1))
    nodes = torch.ones(1, REACH, 1)
    tree = MergedTree(nodes.long(), nodes == 0, nodes.long(), nodes * share, nodes * votes)
    calibration = LookupCalibration(device="cpu")
    buckets = calibration.buckets(matches, tree, torch.tensor([temperature]))
    assert (buckets >= 0).all()
    assert (buckets < ABSENT).all()
    return calibration.ratios[buckets][0, :, 0]


def test_more_evidence_never_lowers_the_odds() -> None:
    by_strength = torch.stack([prior(s, 0.5, 2) for s in range(NUM_STRENGTHS)])
    assert (by_strength.diff(dim=0)[: PREDICTED - 1] >= 0).all()
    assert (by_strength[PREDICTED:] > by_strength[:PREDICTED]).all()
    assert (torch.stack([prior(3, share / 10, 2) for share in range(11)]).diff(dim=0) >= 0).all()
    assert (torch.stack([prior(3, 0.5, votes) for votes in range(1, 13)]).diff(dim=0) >= 0).all()
    assert (prior(3, 0.5, 2).diff() >= 0).all()
    assert (prior(3, 0.5, 2, temperature=1.0) < prior(3, 0.5, 2)).all()


def test_all_evidence_has_a_bucket_of_its_own() -> None:
    corners = [prior(s, share, votes) for s in (1, 16, PREDICTED + 1) for share in (0.05, 1.0) for votes in (1, 12)]
    assert len({float(c[0]) for c in corners} | {float(c[-1]) for c in corners}) >= 20


def test_rates_stay_below_one_whatever_is_observed() -> None:
    calibration, bucket, yes = LookupCalibration(device="cpu"), torch.tensor([3]), torch.tensor([True])
    for _ in range(5000):
        calibration.observe(bucket, yes, yes)
    assert calibration.ratios[bucket] < 1
