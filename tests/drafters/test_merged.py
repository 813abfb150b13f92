"""Two drafters behind one: trees merged, credits counted, and the costly one spared when it does not pay."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.random_tree import RandomTreeDrafter
from drafters.tree import Candidates, DraftTree, VerifyResult
from tests.kernels.tensor_program import kernels, record

ROW = torch.tensor([1])
NOISE = Noise(torch.zeros(1).long(), torch.zeros(1), torch.tensor([9]))


class Chain:
    """Proposes one and the same chain of tokens, and notes what it hears."""

    num_blocks = 5

    def __init__(self, name: str, tokens: list[int], odds: float, taps: tuple[int, ...] = ()) -> None:
        self.name, self.sources = name, (name,)
        self.version = 3
        self.tap_layers = taps
        self.reads_prompts = bool(taps)
        self.heard: list[str] = []
        self.features: list[Tensor] = []
        survival = torch.full((1, len(tokens)), odds).cumprod(1)
        tree = DraftTree.of(torch.tensor([tokens]), torch.arange(len(tokens))[None] - 1)
        self.tree = DraftTree(tree.tokens, tree.parents, tree.depths, survival, tree.num_nodes)

    ready = True

    @property
    def wants_scores(self) -> bool:
        return self.name == "network"

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self.heard.append("start")

    def renew(self) -> None:
        self.heard.append("renew")

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self.heard.append("grow")
        return self.tree

    def read(self, read: Read) -> None:
        self.heard.append("read")
        self.features.append(read.features)

    def commit(self, committed: Committed) -> None:
        self.heard.append("commit")
        self.features += [] if committed.features is None else [committed.features]

    def timed(self, times: StepTimes) -> None:
        self.heard.append("timed")

    def finish(self, rows: Sequence[int]) -> list[int]:
        return [len(self.name)] * len(rows)

    def credits(self) -> Mapping[str, int]:
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes({self.name: 2.0}, {self.name: 1.0})


def merged(cheap: Chain, costly: Chain) -> MergedDrafter:
    return MergedDrafter(cheap, costly, DraftingSizes(max_sequences=2, max_length=0, max_nodes=8))


def committed(accepted: list[int], bonus: int) -> Committed:
    count = len(accepted)
    tokens = torch.tensor([[*accepted, bonus]])
    result = VerifyResult(torch.arange(count)[None], torch.tensor([count]), torch.tensor([bonus]), tokens)
    rows = torch.zeros(1, count + 1).long()
    return Committed(ROW, tokens, torch.tensor([count + 1]), DraftTree.empty(1), result, None, ROW, rows)


def after_hundred_steps() -> tuple[Chain, Chain, MergedDrafter]:
    """A cheap drafter that knows it all, a costly one that knows no more, and both behind one."""
    cheap, costly = Chain("lookup", [5, 6], 0.9), Chain("net", [5, 6], 0.9)
    both = merged(cheap, costly)
    for _ in range(100):
        both.grow(ROW, NOISE)
        both.commit(committed([5, 6], 1))
        both.timed(StepTimes(1.0 + (costly.heard[-2] == "grow"), 0.0, reads_prompts=False))
    return cheap, costly, both


def test_equal_paths_become_one_node_with_the_larger_survival() -> None:
    both = merged(Chain("lookup", [5, 6, 7], 0.5), Chain("net", [5, 6, 8], 0.9))
    tree = both.grow(ROW, NOISE)
    assert int(tree.num_nodes) == 4
    found = dict(zip(tree.tokens[0].tolist(), tree.survival[0].tolist(), strict=True))
    assert [found[token] for token in (5, 6, 8)] == torch.full((3,), 0.9).cumprod(0).tolist()
    assert found[7] == torch.full((3,), 0.5).cumprod(0)[2].item()


def test_it_speaks_for_both() -> None:
    both = merged(Chain("lookup", [1], 0.5), Chain("net", [2], 0.5, taps=(1, 2)))
    assert (both.name, both.version, both.tap_layers) == ("lookup+net", 3, (1, 2))
    assert (both.num_blocks, both.rank_outcomes()) == (10, RankOutcomes({"net": 2.0}, {"net": 1.0}))
    assert both.finish([1]) == [len("lookup")]  # predictions are the cheap one's business


def test_credit_goes_to_everyone_who_was_right() -> None:
    both = merged(Chain("lookup", [5, 6, 7], 0.5), Chain("net", [5, 9], 0.9))
    both.grow(ROW, NOISE)
    both.commit(committed([5, 6], 7))  # 7 came as the bonus token: nobody's acceptance
    assert both.credits() == {"lookup": 2, "net": 1}
    both.commit(committed([5, 6], 7))  # nothing was grown for this step
    assert both.credits() == {"lookup": 2, "net": 1}


def test_the_costly_one_is_spared_when_the_cheap_one_knows_it_all() -> None:
    cheap, costly, _ = after_hundred_steps()
    assert cheap.heard.count("grow") == 100
    assert costly.heard.count("grow") < 25
    assert costly.heard.count("commit") == 100  # it goes on reading along


def test_a_new_version_of_the_costly_one_is_asked_again() -> None:
    _, costly, both = after_hundred_steps()
    before = costly.heard.count("grow")
    both.grow(ROW, NOISE)
    assert costly.heard.count("grow") == before
    both.commit(committed([5, 6], 1))
    both.renew()
    both.grow(ROW, NOISE)
    assert costly.heard.count("grow") == before + 1


def test_what_is_yet_to_be_made_leaves_the_cheap_one_alone() -> None:
    cheap, costly = Chain("lookup", [5, 6], 0.9), Chain("net", [5, 7], 0.9)
    both = merged(cheap, costly)
    costly.ready = False
    both.start([DraftContext(1, [1, 2])])
    assert torch.equal(both.grow(ROW, NOISE).tokens, cheap.tree.tokens)
    both.commit(committed([5, 6], 1))
    assert (both.name, both.credits()) == ("lookup", {})
    assert costly.heard == ["start", "commit"], "it may record"
    costly.ready = True
    both.renew()
    both.grow(ROW, NOISE)
    both.commit(committed([5, 6], 1))
    assert (both.name, both.credits()) == ("lookup+net", {"lookup": 2, "net": 1})


def test_both_observe_everything() -> None:
    cheap, costly = Chain("small", [5], 0.9, taps=(1, 4)), Chain("net", [5], 0.9, taps=(4, 2))
    both = merged(cheap, costly)
    assert both.tap_layers == (1, 4, 2)
    both.start([DraftContext(1, [1, 2])])
    features = torch.tensor([[10.0, 40.0, 20.0]])
    both.read(Read(1, 0, ROW, ROW, features))
    both.commit(replace(committed([], 1), features=features[None]))
    assert cheap.heard == costly.heard == ["start", "read", "commit"]
    for one, expected in ((cheap, [10.0, 40.0]), (costly, [40.0, 20.0])):
        assert [told.flatten().tolist() for told in one.features] == [expected, expected], "each its own"


def test_one_that_asks_for_no_prompts_is_not_told_of_them() -> None:
    cheap, costly = Chain("lookup", [5], 0.9), Chain("net", [5], 0.9, taps=(1, 4))
    both = merged(cheap, costly)
    both.read(Read(1, 0, ROW, ROW, torch.zeros(1, 4)))
    assert (cheap.heard, costly.heard) == ([], ["read"])


def test_captured_it_merges_and_credits_the_same() -> None:
    sizes = DraftingSizes(max_sequences=4, max_length=40, max_nodes=12, vocab_size=5)
    generator = torch.Generator().manual_seed(3)
    with kernels():
        eager, captured = (
            MergedDrafter(
                RandomTreeDrafter(sizes, seed=1),
                RandomTreeDrafter(sizes, seed=2),
                replace(sizes, capture=capture),
            )
            for capture in (None, record)
        )
        for step in range(20):
            rows = torch.randperm(4, generator=generator)[: 1 + step % 4]
            noise = Noise(rows, rows.float(), rows)
            one, other = eager.grow(rows, noise), captured.grow(rows, noise)
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
            tokens = torch.randint(5, (len(rows), 4), generator=generator)
            counts = torch.randint(1, 5, (len(rows),), generator=generator)
            tokens[torch.arange(4) >= counts[:, None]] = -1
            result = VerifyResult(tokens[:, :3], counts - 1, counts, tokens)
            nowhere = torch.zeros_like(tokens)
            emitted = Committed(rows, tokens, counts, DraftTree.empty(len(rows)), result, None, rows, nowhere)
            for drafter in (eager, captured):
                drafter.commit(emitted)
        assert eager.credits() == captured.credits()
        assert sum(captured.credits().values()) > 0
