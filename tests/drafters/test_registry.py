"""Drafters by name: kinds, two in one tree, and kinds that other distributions bring."""

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given

from drafters import registry
from drafters.kinds import Parts
from drafters.protocol import Drafter, DraftingSizes, Noise
from drafters.registry import NoDrafter, build_drafter, kind_names, needs_of, reads_predictions, trained_kind_of
from drafters.tree import MAX_DEPTH, ROOT, DraftTree, path_tokens
from kernels.trees import ancestor_matrix
from tests.drafters.trees import draft_trees, path_to

SIZES = DraftingSizes(max_sequences=2, max_length=64, vocab_size=100, num_slots=80, max_nodes=8)
_OTHERS = """
from drafters.kinds import Kind
from tests.random_tree import RandomTreeDrafter


class Named(RandomTreeDrafter):
    def __init__(self, parts):
        super().__init__(parts.sizes)
        self.name = "echo"


KIND = Kind(Named)
NOTHING = 3
"""


def build(name: str) -> Drafter:
    return build_drafter(name, Parts(sizes=SIZES))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with kinds of its own, as an installer would leave it behind."""
    (tmp_path / "echoing_drafters.py").write_text(_OTHERS)
    (tmp_path / "broken_drafters.py").write_text("KIND = 1 / 0\n")
    reported = tmp_path / "echoing_drafters-1.0.dist-info"
    reported.mkdir()
    (reported / "METADATA").write_text("Metadata-Version: 2.1\nName: echoing-drafters\nVersion: 1.0\n")
    (reported / "entry_points.txt").write_text(
        "[adaptree.drafters]\n"
        "echo = echoing_drafters:KIND\n"
        "memory = echoing_drafters:KIND\n"
        "wrong = echoing_drafters:NOTHING\n"
        "gone = echoing_drafters:MISSING\n"
        "broken = broken_drafters:KIND\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "echoing_drafters", raising=False)


@pytest.mark.parametrize("name", ["memory", "none", "random", "memory+random"])
def test_a_drafter_answers_to_its_name(name: str) -> None:
    drafter = build(name)
    assert drafter.name == name
    assert drafter.sources == tuple(re.findall(r"memory|none|random", name))
    assert drafter.tap_layers == ()
    assert not drafter.reads_prompts


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("eagle", "unknown drafter 'eagle': choose one of memory, none, specblock"),
        ("memory+eagle", "unknown drafter 'eagle': choose one of"),
        ("memory+none+random", "joins 3 drafters: one tree has at most two"),
        ("memory+memory", "names the same drafter twice"),
        ("memory+", "unknown drafter ''"),
        ("specblock(rank)", r"unknown drafter 'specblock\(rank\)'"),
        ("specblock", "needs trained weights: set drafter_path"),
        ("draft_model", "set drafter_path"),
        ("draft_model+specblock", r"only the memory combines with another, as in memory\+specblock"),
        ("lookup", "choose one of memory"),
        ("memory+medusa", "drafter 'medusa' is a plug-in of benchmarks/baselines"),
        *((name, "unknown drafter.*choose one of") for name in ("switch(memory,specblock)", "early_exit(4)")),
    ],
)
def test_a_name_that_cannot_be_says_why(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build(name)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("memory", {"nothing"}),
        ("specblock+memory", {"nothing", "weights"}),
        ("draft_model", {"model"}),
    ],
)
def test_a_kind_says_what_it_needs(name: str, needs: set[str]) -> None:
    assert needs_of(name) == needs


def test_the_order_in_which_two_are_written_changes_nothing() -> None:
    assert registry._resolved("memory+random") == registry._resolved("random+memory")


@pytest.mark.usefixtures("installed")
def test_other_distributions_bring_kinds() -> None:
    assert kind_names()[-5:] == ("broken", "echo", "gone", "random", "wrong")
    assert build("echo").name == "echo"
    assert build("memory+echo").name == "memory+echo", "none takes the place of a kind of ours"
    with pytest.raises(ValueError, match=r"one of .*draft_model, broken, echo, gone, random, wrong, or memory"):
        build("eagle")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("wrong", "is neither a Kind nor a TrainedKind"),
        ("gone", "cannot be loaded"),
        ("broken", r"cannot be loaded: ZeroDivisionError"),
    ],
)
def test_what_is_no_kind_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"drafter '{name}' \(\w+:\w+\) {complaint}"):
        build(name)


def test_the_trained_kind_of_a_name_is_known() -> None:
    assert trained_kind_of("memory+eagle3") == trained_kind_of("eagle3") == "eagle3"
    assert trained_kind_of("memory+draft_model") is None


def test_predictions_are_read_by_the_memory_and_the_random_drafter() -> None:
    assert all(map(reads_predictions, ("memory", "memory+specblock", "random")))
    assert not any(map(reads_predictions, ("none", "specblock", "draft_model")))


def test_without_a_drafter_the_tree_is_empty() -> None:
    rows = torch.tensor([3, 1])
    candidates = NoDrafter().grow(rows, Noise(torch.zeros(2), torch.zeros(2), torch.zeros(2)))
    assert candidates.tokens.shape == (2, 0)
    assert candidates.num_nodes.tolist() == [0, 0]
    assert NoDrafter().finish([3, 1]) == [0, 0]


# Trees, their ancestors and paths.


@given(draft_trees())
def test_path_tokens_stand_in_order_from_the_root(tree: DraftTree) -> None:
    paths = path_tokens(tree.tokens, ancestor_matrix(tree.parents), MAX_DEPTH)
    assert (paths[:, 0] == -1).all()
    for b, count in enumerate(tree.num_nodes.tolist()):
        for i in range(count):
            tokens = [int(tree.tokens[b, j]) for j in path_to(tree, b, i)]
            assert paths[b, i + 1].tolist() == tokens + [-1] * (MAX_DEPTH - len(tokens))


def test_paths_are_cut_at_the_depth_asked_for() -> None:
    parents = torch.tensor([[ROOT, 0, 1]])
    paths = path_tokens(torch.tensor([[7, 8, 9]]), ancestor_matrix(parents), 2)
    assert paths.tolist() == [[[-1, -1], [7, -1], [7, 8], [7, 8]]]
