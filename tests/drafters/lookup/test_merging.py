import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookup.history import SEPARATOR
from drafters.lookup.matching import Matches
from drafters.lookup.merging import Merger
from drafters.tree import MAX_DEPTH

MATCHES = 6

matches = st.tuples(
    st.lists(
        st.lists(st.integers(0, 1), max_size=4).map(
            lambda tokens: tokens + [SEPARATOR] * (MAX_DEPTH + 1 - len(tokens))
        ),
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
            assert tree.parents[0, d, i] == (0 if d == 0 else 1 + (d - 1) * MATCHES + behind_parent[0])
            share = sum(weights[j] for j in behind) / sum(weights[j] for j in behind_parent)
            assert abs(float(tree.share[0, d, i]) - share) < 1e-5
