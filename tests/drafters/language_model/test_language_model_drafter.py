"""Language models as drafters: never a token different from plain decoding, and proposals that are what the model would
say, whatever was cached, preempted or left out before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from drafters.calibration import RankCalibration
from drafters.language_model.drafter import DEPTH
from drafters.language_model.forward import Sequences
from drafters.protocol import DraftContext, DraftingSizes, HostMetadata, Read
from service.engine.requests import GenerationRequest, SamplingParams, SpeculationParams
from tests.drafters.language_model.parts import (
    SEED,
    Proposals,
    drafting_engine,
    greedy_continuation,
)
from tests.service.engine.harness import LIMITS, Generated, alone, ask, collect, generate, greedy, request, sampled
from tests.tiny_models import random_prompts, stock_tiny

TOKENS = 20
SHARED = 70
KINDS = ("draft_model", "memory+draft_model")
CACHED = replace(LIMITS, prefix_cache=True)


def requests_of(params: Sequence[SamplingParams], *, shared: int = 0) -> list[GenerationRequest]:
    """Prompts of many lengths, from a single token on, with a beginning in common."""
    (beginning,) = random_prompts(1, shared, seed=7) if shared else ([],)
    ends = [prompt for place in range(len(params)) for prompt in random_prompts(1, 1 + 29 * place % 64, seed=place)]
    return [
        request(str(place), beginning + end, one) for place, (end, one) in enumerate(zip(ends, params, strict=True))
    ]


def assert_plain(asked: Sequence[GenerationRequest], results: Mapping[tuple[str, int], Generated]) -> None:
    expected = [alone(one.sampling, one.prompt).tokens for one in asked]
    assert [results[one.request_id, 0].tokens for one in asked] == expected


MIXED = [greedy(TOKENS) if place % 2 else sampled(place, TOKENS) for place in range(5)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind: str) -> None:
    asked = requests_of(MIXED)
    assert_plain(asked, generate(drafting_engine(kind, draft_seed=SEED), *asked))


@pytest.mark.parametrize("params", [greedy(160), sampled(3, 160)], ids=["greedy", "sampled"])
def test_of_a_draft_model_that_is_the_target_every_token_is_accepted(params: SamplingParams) -> None:
    """At a temperature above 0 because it ranks by the noise with which the target samples."""
    (prompt,) = random_prompts(1, 30, seed=2)
    engine = drafting_engine("draft_model")
    proposals = Proposals.of(engine)
    result = generate(engine, request("a", prompt, params))["a", 0]
    ahead = alone(replace(params, max_tokens=params.max_tokens + DEPTH), prompt).tokens
    assert result.tokens == ahead[: params.max_tokens]
    text = [*prompt, *ahead]
    for known, chain in proposals.seen:
        assert chain == tuple(text[len(known) : len(known) + len(chain)])
    left = [len(prompt) + params.max_tokens - len(known) - 1 for known, _ in proposals.seen]
    assert result.end.speculation is not None
    drafted = [min(len(chain), most) for (_, chain), most in zip(proposals.seen, left, strict=True)]
    assert list(result.end.speculation.accepted_per_step) == [count for count in drafted if count]
    assert max(drafted) == DEPTH, "as soon as it is known how often its first ranks are right"


def run_with_interruptions() -> Proposals:
    """Sequences that begin alike, some of which draft nothing and some of which lose their slots in between, in a pool
    so small that what is kept is soon given up. Each must be that of plain decoding."""
    engine = drafting_engine(
        "draft_model", limits=replace(CACHED, max_sequences=3, prefill_chunk=40), num_slots=340, draft_seed=SEED
    )
    proposals = Proposals.of(engine)
    asked = requests_of([greedy(TOKENS)] * 6, shared=SHARED)
    asked = [replace(one, speculation=SpeculationParams(enabled=place % 3 != 1)) for place, one in enumerate(asked)]
    results = {(one.request_id, 0): Generated() for one in asked}
    for one in asked:
        ask(engine, one)
    steps = 0
    while not engine.idle:
        if steps % 5 == 4 and len(engine.scheduler.running) > 1:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        collect(engine.step().outputs, results)
        engine.assert_conserved()
        steps += 1
    assert_plain(asked, results)
    assert sum(result.end.cached_tokens for result in results.values()) > 0
    return proposals


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likeliest child is that of the model alone, whatever has come true of its first ranks."""
    monkeypatch.setattr(RankCalibration, "trust", lambda self, block: torch.ones_like(self.buckets(block)).float())


@pytest.mark.usefixtures("believed")
def test_proposals_are_what_the_model_says() -> None:
    proposals = run_with_interruptions()
    for text, chain in proposals.seen:
        assert chain == greedy_continuation(stock_tiny("llama", SEED), text, len(chain))
    assert sum(len(chain) for _, chain in proposals.seen) > len(proposals.seen)


@pytest.mark.usefixtures("believed")
def test_what_was_not_followed_is_run_before_it_is_read() -> None:
    """A server that had no use for drafts lets the model know of nothing."""
    engine = drafting_engine("draft_model", draft_seed=SEED, limits=replace(LIMITS, prefill_chunk=300))
    follow = engine.drafter.read
    engine.drafter.read = lambda read: follow(replace(read, follow=False))  # type: ignore[method-assign]
    proposals = Proposals.of(engine)
    (prompt,) = random_prompts(1, 290, seed=4)  # more than is run at once
    result = generate(engine, request("a", prompt, greedy(8)))["a", 0]
    assert result.tokens == alone(greedy(8), prompt).tokens
    for text, chain in proposals.seen:
        assert chain == greedy_continuation(stock_tiny("llama", SEED), text, len(chain))


def test_slots_that_hold_another_text_are_not_read() -> None:
    keys = Sequences(DraftingSizes(max_sequences=2, max_length=8, max_nodes=4, num_slots=9))
    first, second = HostMetadata((0,), (3,)), HostMetadata((1,), (4,))
    keys.start(DraftContext(0, [5, 6, 7, 8]))
    assert keys.missing(first) == [range(0, 3)]
    keys.read(Read(0, 0, torch.tensor([6, 7, 8]), torch.tensor([4, 2, 7]), torch.zeros(3, 0)))
    keys.run(0, 3)
    keys.start(DraftContext(1, [5, 6, 7, 8, 9], cached=torch.tensor([4, 2, 7, 5])))
    assert keys.missing(second) == [range(3, 4)]
    keys.read(Read(0, 3, torch.tensor([9]), torch.tensor([2]), torch.zeros(1, 0)))  # another position in a slot
    keys.start(DraftContext(1, [5, 6, 7, 8, 9], cached=torch.tensor([4, 2, 7, 5])))
    assert keys.missing(second) == [range(1, 4)]
