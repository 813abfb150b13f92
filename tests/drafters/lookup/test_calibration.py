"""More evidence never lowers a copied node's rate."""

import torch

from drafters.lookup.calibration import ABSENT, NUM_STRENGTHS, LookupCalibration
from kernels.lookup import PREDICTED

EVIDENCE = LookupCalibration(device="cpu").evidence


def prior(strength: int, share: float, votes: int, temperature: float = 0.0) -> torch.Tensor:
    """Prior rates along a chain with this evidence. # [depth]"""
    parts = EVIDENCE.of_strength[strength] + EVIDENCE.of_depth + EVIDENCE.sampled * (temperature > 0)
    edges = ((EVIDENCE.share_edges, share, EVIDENCE.share), (EVIDENCE.vote_edges, votes, EVIDENCE.votes))
    buckets = parts + sum(int((value > passed).sum()) * stride for passed, value, stride in edges)
    assert (buckets >= 0).all()
    assert (buckets < ABSENT).all()
    return EVIDENCE.rates[buckets]


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
    assert calibration.rates[bucket] < 1
