"""Matches of a text's end, and the tree of what followed them: the reference's and the compiled ones, against loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.lookup.calibration import ABSENT, MAX_MATCHES, REACH, LookupCalibration
from drafters.lookup.history import History
from drafters.protocol import DraftContext
from kernels import ops
from kernels.lookup import CONTEXT, SEPARATOR, Matches
from kernels.ops import REFERENCE, Ops
from kernels.trees import DraftTree
from tests.drafters.trees import assert_valid_tree, path_to

torch.set_num_threads(1)

COMPILED = ops.on(torch.device("cpu"))
KINDS = pytest.mark.parametrize("kind", [REFERENCE, COMPILED], ids=["reference", "compiled"])
EVIDENCE = LookupCalibration(device="cpu").evidence


def found_in(kind: Ops, history: History, rows: list[int], matches: int, reach: int = 4) -> Matches:
    columns = history.columns(CONTEXT + matches + 2)
    return kind.find_matches(history.texts, torch.tensor(rows), columns, matches, reach)


def common_suffix(a: list[int], b: list[int]) -> int:
    length = 0
    while length < min(CONTEXT, len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


@KINDS
@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_all_matches_of_a_short_text_are_found_longest_first_then_latest(kind: Ops, text: list[int]) -> None:
    history = History(2, 64, "cpu")
    history.start([DraftContext(1, text)])
    matches = found_in(kind, history, [1], 40)
    oracle = sorted(
        ((common_suffix(text[: i + 1], text), i) for i in range(len(text) - 1) if text[i] == text[-1]), reverse=True
    )
    found = int((matches.strengths > 0).sum())
    places = (matches.columns - CONTEXT)[0, :found].tolist()
    assert list(zip(matches.strengths[0, :found].tolist(), places, strict=True)) == oracle


@KINDS
def test_matches_do_not_reach_over_the_beginning(kind: Ops) -> None:
    history = History(1, 64, "cpu")
    history.start([DraftContext(0, [1, 1, 1])])
    assert found_in(kind, history, [0], 4).strengths.tolist() == [[2, 1, 0, 0]]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@given(st.lists(st.tuples(texts, st.lists(st.integers(0, 2), max_size=30)), min_size=1, max_size=3), st.integers(1, 12))
def test_compiled_matches_are_those_of_the_reference(said: list[tuple[list[int], list[int]]], most: int) -> None:
    """Cursors too, with and without a prediction."""
    histories = History(3, 64, "cpu"), History(3, 64, "cpu")
    for history in histories:
        history.start([DraftContext(row, text, prediction=hint) for row, (text, hint) in enumerate(said)])
    one, other = (
        found_in(kind, history, list(range(len(said))), most)
        for kind, history in zip((REFERENCE, COMPILED), histories, strict=True)
    )
    matched = one.strengths > 0
    assert torch.equal(one.strengths, other.strengths)
    assert torch.equal(one.columns[matched], other.columns[matched])
    assert torch.equal(one.continuations, other.continuations)
    assert torch.equal(histories[0].texts.cursors, histories[1].texts.cursors)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    nodes = range(int(tree.num_nodes))
    return {tuple(int(tree.tokens[0, node]) for node in path_to(tree, 0, i)) for i in nodes}


@st.composite
def copies(draw: st.DrawFn) -> Matches:
    """Short continuations of few tokens, so that many begin equally."""
    matches = [[draw(st.integers(0, 1)) for _ in range(draw(st.integers(0, 4)))] for _ in range(MAX_MATCHES)]
    padded = [tokens + [SEPARATOR] * (REACH + 1 - len(tokens)) for tokens in matches]
    strengths = sorted(draw(st.lists(st.integers(1, 33), min_size=MAX_MATCHES, max_size=MAX_MATCHES)), reverse=True)
    return Matches(torch.zeros(1, MAX_MATCHES), torch.tensor([strengths]), torch.tensor([padded]).mT.contiguous())


@KINDS
@given(matches=copies())
def test_equal_beginnings_are_one_node(kind: Ops, matches: Matches) -> None:
    tree, buckets = kind.merge_copies(matches, torch.zeros(1), EVIDENCE, 64, 0.0)
    assert_valid_tree(tree)
    continuations = [[t for t in text if t != SEPARATOR] for text in matches.continuations[0].mT.tolist()]
    expected = {tuple(text[: d + 1]) for text in continuations for d in range(len(text))}
    assert paths_of(tree) == expected
    assert int((buckets != ABSENT).sum()) == len(expected)


@given(copies(), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.02, 0.3]), st.integers(1, 40))
def test_compiled_copies_are_merged_as_the_reference(
    matches: Matches, temperature: float, least: float, width: int
) -> None:
    given = matches, torch.tensor([temperature]), EVIDENCE, width, least
    (tree, buckets), (same, others) = REFERENCE.merge_copies(*given), COMPILED.merge_copies(*given)
    assert torch.equal(buckets, others)
    assert torch.allclose(tree.survival, same.survival)
    assert torch.equal(tree.num_nodes, same.num_nodes)
    if int(tree.num_nodes) < width:  # where nodes are left out, those that stay may hang on the last bit
        assert paths_of(tree) == paths_of(same)
