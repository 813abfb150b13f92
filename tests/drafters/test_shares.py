"""Past answers by scope: whose room is taken, by whom, and what is left when they are forgotten."""

from collections.abc import Sequence

import pytest
import torch

from drafters.memory.drafter import MemoryDrafter
from drafters.memory.past import Shares
from drafters.protocol import Committed, DraftContext, DraftingSizes, MemorySizes, Noise
from drafters.tree import DraftTree, VerifyResult
from kernels.trees import ROOT

SIZES = MemorySizes(num_bytes=4 << 16, owners=2, scopes=2)
ANSWER = [7, 8, 9, 7, 8, 9, 5]


def used(shares: Shares, *scopes: str) -> None:
    for scope in scopes:
        taken = shares.take(scope)
        assert taken is not None
        shares.release(taken[0])


def test_an_owners_scopes_take_each_others_shares_alone() -> None:
    shares = Shares(SIZES)
    used(shares, "a/1", "b/1", "a/2", "a/3", "a/2", "a/4")
    assert set(shares.held()) == {"b/1", "a/2", "a/4"}
    assert len(set(shares.held().values())) == 3


def test_an_owner_without_shares_gets_none() -> None:
    shares = Shares(SIZES)
    used(shares, "a", "b")
    assert shares.take("c") is None
    assert shares.read("c") is None


def test_where_owners_are_keys_no_other_takes_their_room() -> None:
    """As a server's own requests, which have no key."""
    shares = Shares(MemorySizes(num_bytes=1, owners=1, has_keys=True))
    assert shares.take("") is None
    used(shares, "a")


def test_what_runs_keeps_its_share() -> None:
    shares = Shares(SIZES)
    first, second = shares.take("a/1"), shares.take("a/2")
    assert first is not None
    assert second is not None
    assert shares.take("a/3") is None
    shares.release(second[0])
    assert shares.take("a/3") == (second[0], "a/2")
    assert shares.take("a/1") == (first[0], None)


def test_who_only_reads_changes_nothing() -> None:
    shares = Shares(SIZES)
    used(shares, "a/1", "a/2")
    first = shares.read("a/1")
    assert first == shares.held()["a/1"]
    assert shares.take("a/3") == (shares.held()["a/3"], "a/2"), "what is read is not taken"
    shares.release(first)
    shares.release(shares.held()["a/3"])
    used(shares, "a/4")
    assert set(shares.held()) == {"a/3", "a/4"}, "and is no later used for that"


def test_what_is_forgotten_is_unused_unless_it_is_read() -> None:
    shares = Shares(SIZES)
    used(shares, "a/1", "a/2", "b/1")
    taken = shares.take("a/2")
    assert shares.forget("a/1") == [0]
    assert set(shares.held()) == {"a/2", "b/1"}
    assert sorted(shares.forget()) == [1, 2]
    assert shares.held() == {"a/2": 1} == {"a/2": taken and taken[0]}
    assert shares.forget("a/1") == []


class Speaker:
    """A drafter of three rows, and texts that it follows."""

    def __init__(self) -> None:
        self.drafter = MemoryDrafter(DraftingSizes(max_sequences=2, max_length=64, max_nodes=8, memory=SIZES))

    def answer(self, scope: str | None, row: int = 0, *, store: bool = True, ends: bool = True) -> list[list[object]]:
        """The trees of one text, from its beginning."""
        self.drafter.start([DraftContext(row, [1, 2], scope=scope, store=store)])
        trees = [self._tree(row)]
        for token in ANSWER:
            self.commit(row, [token])
            trees.append(self._tree(row))
        if ends:
            self.drafter.finish([row])
        return trees

    def _tree(self, row: int) -> list[object]:
        rows = torch.tensor([row])
        tree = self.drafter.grow(rows, Noise(rows, torch.zeros(1), rows))
        return [part.tolist() for part in tree]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        rows, spoken = torch.tensor([row]), torch.tensor([tokens])
        counts = torch.tensor([len(tokens)])
        result = VerifyResult(spoken[:, 1:], counts - 1, spoken)
        self.drafter.commit(Committed(rows, spoken, counts, DraftTree.empty(1), result, None, rows, spoken))


@pytest.mark.parametrize("spoken", [["b"], ["b", "a/2"], [None]])
def test_trees_know_nothing_of_other_scopes(spoken: list[str | None]) -> None:
    server = Speaker()
    for scope in spoken:
        server.answer(scope)
    assert server.answer("a/1") == Speaker().answer("a/1")
    assert server.answer("a/1", row=1) != Speaker().answer("a/1")


def test_what_must_not_be_stored_changes_no_later_tree() -> None:
    server, untouched = Speaker(), Speaker()
    for one in (server, untouched):
        one.answer("a/1")
        one.answer("a/2")
    server.answer("a/1", store=False)
    server.answer("a/5", store=False)
    for scope in ("a/3", "a/2", "a/1"):
        assert server.answer(scope) == untouched.answer(scope)


@pytest.mark.parametrize("scope", ["a/1", None])
def test_forgetting_leaves_nothing_but_what_is_written_later(scope: str | None) -> None:
    server = Speaker()
    server.answer("a/1")
    server.answer("a/1", row=1, ends=False)
    server.drafter.forget(scope)
    assert server.answer("a/1") == Speaker().answer("a/1")
    assert server.answer("a/1") != Speaker().answer("a/1")


def test_listeners_hear_nothing_of_what_was_forgotten() -> None:
    """Else a file or a replica would remember it."""
    heard = list[list[int]]()

    class Listener:
        def answered(self, scope: str, tokens: Sequence[int], num_new: int) -> None:
            heard.append(list(tokens[-num_new:]))

        def forgot(self, scope: str | None) -> None:
            return

    drafter, text = Speaker().drafter, [1, 2]
    drafter.past.listeners.append(Listener())
    drafter.start([DraftContext(0, text, scope="a/1")])
    text += [7, 8]
    drafter.forget("a/1")
    text.append(9)
    drafter.finish([0])
    assert heard == [[9]]


def test_a_row_keeps_nothing_of_the_text_before() -> None:
    """Nor what a network proposed for that, of which weights would learn."""
    server = Speaker()
    memory = server.drafter._memory
    memory.network.num_nodes[0], memory.network.parents[0, 0], memory.network.tokens[0, 0] = 1, ROOT, 7
    server.drafter.start([DraftContext(0, [1, 2], scope="a/1")])
    server.commit(0, [7])
    assert torch.equal(memory.weights, Speaker().drafter._memory.weights)
