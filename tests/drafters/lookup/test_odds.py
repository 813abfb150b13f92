import torch

from drafters.lookup.matching import NUM_STRENGTHS, PREDICTED, Matches
from drafters.lookup.merging import MergedTree
from drafters.lookup.odds import ABSENT, LookupOdds
from drafters.tree import MAX_DEPTH


def prior(strength: int, share: float, votes: int, temperature: float = 0.0) -> torch.Tensor:
    """Prior odds along a chain with this evidence. # [depth]"""
    matches = Matches(torch.zeros(1, 1), torch.tensor([[strength]]), torch.zeros(1, MAX_DEPTH, 1))
    nodes = torch.ones(1, MAX_DEPTH, 1)
    tree = MergedTree(nodes.long(), nodes == 0, nodes.long(), nodes * share, nodes * votes)
    odds = LookupOdds(device="cpu")
    buckets = odds.buckets(matches, tree, torch.tensor([temperature]))
    assert (buckets >= 0).all()
    assert (buckets < ABSENT).all()
    return odds.rate(buckets)[0, :, 0]


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


def test_odds_stay_below_one_whatever_is_observed() -> None:
    odds, bucket, yes = LookupOdds(device="cpu"), torch.tensor([3]), torch.tensor([True])
    for _ in range(5000):
        odds.observe(bucket, yes, yes)
    assert odds.rate(bucket) < 1
