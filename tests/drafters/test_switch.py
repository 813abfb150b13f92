"""Two drafters of which one is asked in a step: the one that gains more, as far as the ledger lets the second lose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from drafters.memory.counts import MemoryCounts
from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.readback import Readback
from drafters.regret import CAP_STEPS, RegretLedger
from drafters.switch import SwitchDrafter
from drafters.tree import Candidates, DraftTree, VerifyResult

SIZES = DraftingSizes(max_sequences=2, max_length=0, max_nodes=8)
ROWS = torch.tensor([1])
NOISE = Noise(torch.zeros(1).long(), torch.zeros(1), torch.tensor([9]))


@dataclass
class Part:
    """A drafter that notes what it hears."""

    name: str
    tap_layers: tuple[int, ...] = ()
    reads_prompts: bool = True
    ready: bool = True
    version: int = 2
    num_blocks: int = 5
    wants_scores: bool = False
    heard: list[object] = field(default_factory=list)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.name,)

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self.heard.append("start")

    def on_weights_changed(self) -> None:
        self.heard.append("on_weights_changed")

    def forget(self, scope: str | None = None) -> None:
        self.heard.append(("forget", scope))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        self.heard.append("grow")
        return DraftTree.empty(len(rows))

    def read(self, read: Read) -> None:
        self.heard.append(("read", read.features.tolist(), read.follow))

    def commit(self, committed: Committed) -> None:
        features = None if committed.features is None else committed.features.tolist()
        self.heard.append(("commit", features, committed.follow))

    def timed(self, times: StepTimes) -> None:
        self.heard.append("timed")

    def finish(self, rows: Sequence[int]) -> list[int]:
        return [len(self.name)] * len(rows)

    def credits(self) -> Mapping[str, int]:
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes({self.name: 2.0}, {self.name: 1.0})

    def memory_counts(self) -> MemoryCounts | None:
        return MemoryCounts(reserved_bytes=64) if self.name == "memory" else None


def committed(accepted: int, batch: int = 1, features: Tensor | None = None, choices: int = 1) -> Committed:
    """Each of a batch of texts goes on by so many accepted tokens and one, which was one of so many alike."""
    tokens = torch.ones(batch, accepted + 1).long()
    lengths = torch.full((batch,), accepted)
    logits = torch.zeros(batch, 64).index_fill(1, torch.arange(choices, 64), float("-inf"))
    result = VerifyResult(tokens[:, 1:], lengths, tokens)
    return Committed(
        lengths,
        tokens,
        lengths + 1,
        DraftTree.empty(batch),
        result,
        features,
        lengths,
        tokens,
        last_logits=lambda: logits,
    )


def run(
    switch: SwitchDrafter, accepted: tuple[int, int], seconds: tuple[float, float], steps: int, batch: int = 1
) -> list[int]:
    """Steps in which either has so many tokens right and takes so long; who was asked in each."""
    first, second = heard_by(switch)
    asked = []
    for _ in range(steps):
        before = second.count("grow")
        switch.grow(torch.arange(batch), NOISE)
        asked.append(second.count("grow") - before)
        switch.commit(committed(accepted[asked[-1]], batch))
        switch.timed(StepTimes(seconds[asked[-1]], 0.0, reads_prompts=False))
    assert first.count("grow") + second.count("grow") >= steps
    return asked


def heard_by(switch: SwitchDrafter) -> list[list[object]]:
    return [one.heard for one in switch.parts if isinstance(one, Part)]


def parts(**changes: object) -> tuple[Part, Part]:
    return Part("memory"), Part("net", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("accepted", "seconds", "best"),
    [
        ((1, 1), (1.0, 1.5), 0),  # no more tokens, more time
        ((1, 3), (1.0, 1.2), 1),  # more tokens for a little time
        ((0, 1), (1.0, 3.0), 0),  # more tokens, but each is dearer
        ((3, 2), (2.0, 1.0), 1),  # fewer tokens, but each is cheaper
    ],
)
def test_the_one_that_makes_more_tokens_per_second_is_asked(
    accepted: tuple[int, int], seconds: tuple[float, float], best: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafters.readback.readback_of", lambda device: Readback(late=late))
    switch = SwitchDrafter(*parts(), SIZES)
    asked = run(switch, accepted, seconds, steps=400)
    assert 0 < sum(asked) < 400, "each is tried"
    assert asked[200:].count(best) > 180


def test_each_size_of_batch_decides_for_itself() -> None:
    switch = SwitchDrafter(*parts(), SIZES)
    for _ in range(60):
        alone = run(switch, (1, 3), (1.0, 1.2), steps=5)
        together = run(switch, (1, 3), (1.0, 9.0), steps=5, batch=8)
    assert (sum(alone), sum(together)) == (5, 0)


def test_each_doubt_of_the_target_decides_for_itself() -> None:
    """The second is right where the target chose among many, the first elsewhere; both cost the same."""
    switch = SwitchDrafter(*parts(), SIZES)
    switch.start([DraftContext(1, [1])])
    asked: dict[int, list[int]] = {1: [], 64: []}
    doubt = 1
    for step in range(600):
        before = heard_by(switch)[1].count("grow")
        switch.grow(ROWS, NOISE)
        asked[doubt].append(heard_by(switch)[1].count("grow") - before)
        right = 3 if asked[doubt][-1] == (doubt == 64) else 0
        doubt = (1, 64)[step % 7 in (1, 2, 4)]
        switch.commit(committed(right, choices=doubt))
        switch.timed(StepTimes(1.0, 0.0, reads_prompts=False))
    assert sum(asked[1][-100:]) < 5
    assert sum(asked[64][-100:]) > 95


def test_what_the_second_loses_is_charged_to_the_ledger() -> None:
    ledger = RegretLedger(share=0.0)
    asked = run(SwitchDrafter(*parts(), replace(SIZES, ledger=ledger)), (1, 0), (1.0, 3.0), steps=50)
    assert sum(asked) > 0
    # A step saves half a step's tokens and takes three, where one of the first saves a whole one and takes one.
    assert ledger.balances["switch to net"] == pytest.approx(CAP_STEPS - 2.5 * sum(asked), rel=0.01)


def test_the_second_does_without_where_nothing_may_be_lost() -> None:
    ledger = RegretLedger(share=0.0)
    switch = SwitchDrafter(*parts(), replace(SIZES, ledger=ledger))
    run(switch, (1, 9), (1.0, 1.0), steps=3)
    ledger.open("switch to net", CAP_STEPS, balance=0.5)
    assert sum(run(switch, (1, 9), (1.0, 1.0), steps=50)) == 0
    switch.start([DraftContext(1, [1])])
    switch.commit(committed(0))
    assert heard_by(switch)[1][-1] == ("commit", None, False), "a text is not followed for nothing"
    ledger.open("switch to net", CAP_STEPS)
    assert sum(run(switch, (1, 9), (1.0, 1.0), steps=50)) == 0, "of this text it knows nothing"
    switch.start([DraftContext(1, [1])])
    assert sum(run(switch, (1, 9), (1.0, 1.0), steps=50)) > 40


def test_prompts_that_it_reads_for_nothing_are_charged_too() -> None:
    ledger = RegretLedger(share=0.0)
    switch = SwitchDrafter(*parts(), replace(SIZES, ledger=ledger))
    run(switch, (1, 1), (1.0, 1.0), steps=9)
    before = ledger.balances["switch to net"]
    switch.timed(StepTimes(9.0, 2.0, reads_prompts=True))
    assert ledger.balances["switch to net"] == before - 2.0


def test_tokens_are_credited_to_who_was_asked() -> None:
    switch = SwitchDrafter(*parts(), SIZES)
    asked = run(switch, (1, 3), (1.0, 1.0), steps=20)
    assert switch.credits() == {"memory": asked.count(0), "net": 3 * asked.count(1)}
    before = dict(switch.credits())
    switch.commit(committed(0))  # nobody was asked
    assert switch.credits() == before


def test_each_gets_the_features_it_taps() -> None:
    first, second = Part("one", tap_layers=(1, 4)), Part("other", tap_layers=(4, 2))
    switch = SwitchDrafter(first, second, SIZES)
    assert switch.tap_layers == (1, 4, 2)
    features = torch.tensor([[10.0, 11.0, 40.0, 41.0, 20.0, 21.0]])
    switch.read(Read(0, 0, torch.tensor([1]), torch.tensor([1]), features))
    assert first.heard == [("read", [[10.0, 11.0, 40.0, 41.0]], True)]
    assert second.heard == [("read", [[40.0, 41.0, 20.0, 21.0]], True)]
    switch.commit(committed(0, features=features[None]))
    assert first.heard[-1] == ("commit", [[[10.0, 11.0, 40.0, 41.0]]], True)


def test_layers_that_are_tapped_twice_stay_so() -> None:
    second = Part("net", tap_layers=(0, 1, 1))
    switch = SwitchDrafter(Part("memory"), second, SIZES)
    switch.read(Read(0, 0, torch.tensor([1]), torch.tensor([1]), torch.tensor([[1.0, 2.0, 2.0]])))
    assert switch.tap_layers == (0, 1, 1)
    assert second.heard == [("read", [[1.0, 2.0, 2.0]], True)]


def test_both_hear_everything_and_it_speaks_for_both() -> None:
    first, second = parts(wants_scores=True)
    switch = SwitchDrafter(first, second, SIZES)
    switch.start([DraftContext(1, [1])])
    run(switch, (1, 1), (1.0, 1.0), steps=1)
    switch.on_weights_changed()
    switch.forget("scope")
    for one in (first, second):
        heard = [what for what in one.heard if what != "grow"]
        assert heard == ["start", ("commit", None, True), "timed", "on_weights_changed", ("forget", "scope")]
    assert (switch.name, switch.version, switch.num_blocks, switch.wants_scores) == ("switch(memory,net)", 4, 10, True)
    assert switch.finish([0, 1]) == [6, 6]
    assert switch.rank_outcomes() == RankOutcomes({"memory": 2.0, "net": 2.0}, {"memory": 1.0, "net": 1.0})
    for both in ((first, second), (second, first)):
        assert SwitchDrafter(*both, SIZES).memory_counts() == MemoryCounts(reserved_bytes=64)


def test_one_that_is_yet_to_be_made_leaves_the_other_alone() -> None:
    for missing, left in ((0, 1), (1, 0)):
        both = parts()
        both[missing].ready = False
        switch = SwitchDrafter(*both, replace(SIZES, ledger=RegretLedger()))
        run(switch, (1, 1), (1.0, 1.0), steps=5)
        assert (switch.name, switch.credits()) == (both[left].name, {})
        assert both[left].heard.count("grow") == 5
        assert both[missing].heard.count("grow") == 0
        assert switch.ready
        both[missing].ready = True
        assert 0 < sum(run(switch, (1, 1), (1.0, 1.0), steps=20)) < 20
