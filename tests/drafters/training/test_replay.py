"""Replay against drafters whose tau is known beforehand."""

from dataclasses import replace

import pytest
import torch

from adaptation.publisher import Gate
from drafters.network.blocks import TrainedWeights
from drafters.network.checkpoint import weights_of
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.protocol import Committed, DraftContext, DraftingSizes, Noise, Read
from drafters.training.corpus import TOP, Example
from drafters.training.replay import _proposals, examine, replay_served, replay_trees, serving
from drafters.tree import DraftTree, VerifyResult
from tests.drafters.network.parts import tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, always_says, remembered, repeating_example, trainable_drafter

EMBED = tiny_embedding(HIDDEN)
NODES = 16


def drafter(right: bool) -> tuple[SpecBlock, int]:
    """One that always proposes the text's token, or always another."""
    model = trainable_drafter()
    token, other = int(model.d2t[3]), int(model.d2t[5])
    return always_says(model, token if right else other), token


@pytest.mark.parametrize("length", [7, 14, 15, 40])
def test_a_drafter_that_is_always_right(length: int) -> None:
    model, token = drafter(right=True)
    text = repeating_example(token, length)
    drafted = length - text.prompt - 1  # the first response token comes from the prompt
    steps = -(-drafted // (2 * BLOCK + 1))
    done = replay_trees(serving(model, EMBED), [text], max_nodes=16)
    assert (done.steps, done.tokens) == (steps, drafted)


def test_a_drafter_that_is_always_wrong() -> None:
    model, token = drafter(right=False)
    texts = [repeating_example(token, 20), repeating_example(token, 30)]
    assert replay_trees(serving(model, EMBED), texts, max_nodes=16).tau == 1.0


def test_without_a_memory_there_is_a_step_at_each_position() -> None:
    right, token = drafter(right=True)
    text = repeating_example(token, 20)
    starts = range(text.prompt + 1, text.length + 1)  # the position each block drafts first
    done = replay_served(right, EMBED, text)
    assert done.steps == len(starts)
    assert done.tokens == sum(1 + min(BLOCK, max(0, text.length - start)) for start in starts)
    wrong, _ = drafter(right=False)
    assert replay_served(wrong, EMBED, text).tau == replay_served(None, EMBED, text).tau == 1.0


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 5), (1.0, 5), (0.5, -(2**63))])
def test_a_network_proposes_what_it_drafts_while_serving(temperature: float, seed: int) -> None:
    """Tokens, parents and chances, ranked with the noise of the text."""
    model, start = trainable_drafter().requires_grad_(False), 100
    tokens = model.d2t[torch.randint(6, (24,), generator=torch.Generator().manual_seed(3))]
    base = repeating_example(0, 24)
    text = replace(base, tokens=tokens, features=base.features.float(), temperature=temperature, seed=seed, start=start)
    trees = _proposals(model, EMBED, text, NODES)
    assert trees.tokens.shape == (text.length - text.prompt, NODES)
    weights = TrainedWeights(ServingNetwork(model.config, weights_of(model)), EMBED, blocks=1)
    for root in (text.prompt, text.length - 1):
        sizes = DraftingSizes(max_sequences=1, max_length=200, max_nodes=NODES, num_slots=200)
        drafter, slots = SpecBlockDrafter(sizes, weights), torch.arange(1, root + 1)
        begun, here = root - 1, torch.tensor([start + root])
        drafter.start([DraftContext(0, [0] * start + tokens[: root + 1].tolist())])
        drafter.read(Read(0, start, tokens[1:root], slots[:begun], text.features[:begun]))
        rows, count, none = torch.tensor([0]), torch.tensor([1]), torch.zeros(1, 0, dtype=torch.int64)
        verdict, last = VerifyResult(none, here, none), (text.features[None, begun:root], here - 1, slots[None, begun:])
        drafter.commit(Committed(rows, tokens[None, root : root + 1], count, DraftTree.empty(1), verdict, *last))
        noise = Noise(torch.tensor([seed]), torch.tensor([temperature]), here, warm=temperature > 0)
        served, mine = drafter.grow(rows, noise), trees.take(torch.tensor([root - text.prompt]))
        assert torch.equal(served.tokens, mine.tokens)
        assert torch.equal(served.parents, mine.parents)
        assert torch.allclose(served.survival, mine.survival, rtol=1e-3)


def test_texts_beside_each_other_do_not_matter() -> None:
    model = trainable_drafter(seed=3)
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> Example:
        base = repeating_example(0, length)
        tokens = model.d2t[torch.randint(6, (length,), generator=generator)]
        return Example(tokens, base.features, base.prompt, base.top_ids, base.top_logprobs)

    texts = [text(length) for length in (40, 25, 33)]
    alone = [replay_trees(serving(model, EMBED), [one], max_nodes=16) for one in texts]
    assert sum(done.tokens for done in alone) == sum(e.length - e.prompt - 1 for e in texts)
    together = replay_trees(serving(model, EMBED), texts, max_nodes=16)
    assert together.tokens == sum(done.tokens for done in alone)
    assert together.tau > 1.0


def test_scores_are_the_same_twice() -> None:
    model, token = drafter(right=True)
    texts = [repeating_example(token, length) for length in (20, 30, 40)]
    first, again = (examine(model, EMBED, texts, batch_tokens=100, autocast=False) for _ in range(2))
    assert first == again
    assert first.tree_tau > 5
    assert len(first.alpha) == len(first.seen) == 2 * BLOCK


def written(model: SpecBlock, seed: int, length: int = 44) -> Example:
    """A text of random words."""
    generator = torch.Generator().manual_seed(seed)
    return replace(repeating_example(0, length), tokens=model.d2t[torch.randint(64, (length,), generator=generator)])


def test_copies_are_counted_as_steps_one_behind_the_other() -> None:
    """A text that repeats a phrase: once it has been written, steps copy several tokens at a time."""
    phrase = torch.arange(8) + 5
    text = Example(phrase.repeat(12), torch.zeros(96, 3 * HIDDEN), 2, torch.zeros(95, TOP).int(), torch.zeros(95, TOP))
    done = replay_served(None, EMBED, remembered(text, [], nodes=8))
    assert done.tokens == 93
    assert 4.0 < done.tau <= 9.0


def test_a_memory_drafts_what_past_answers_have_written() -> None:
    text = written(trainable_drafter(), 1)
    known, new = remembered(text, [text.tokens.tolist()]), remembered(text, [])
    assert replay_served(None, EMBED, known).tau > 3.0
    assert replay_served(None, EMBED, new).tau < 1.2


@pytest.mark.parametrize("known", [True, False])
def test_words_of_past_answers_are_no_gain_of_a_drafter(known: bool) -> None:
    """The gate publishes a drafter that is right about every other word, unless past answers have these texts."""
    (model, token), (other, _) = drafter(right=True), drafter(right=False)
    right, wrong = list[float](), list[float]()
    for seed in range(8):
        words = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:22] + 10
        tokens = torch.stack([words, torch.full_like(words, token)], dim=1).flatten()
        text = replace(repeating_example(0, 44), tokens=tokens)
        text = remembered(text, [tokens.tolist()] * 3 if known else [], nodes=4)
        right.append(replay_served(model, EMBED, text).tau)
        wrong.append(replay_served(other, EMBED, text).tau)
    decision = Gate(min_texts=8, alpha=0.1, judgements=9).decide(right, wrong, wrong)
    assert decision.publish != known, decision


@pytest.mark.parametrize("length", [30, 12])
def test_a_cut_text_keeps_its_memory(length: int) -> None:
    text = remembered(written(trainable_drafter(), 3), [written(trainable_drafter(), 3).tokens.tolist()])
    cut, memory = text.within(length), text.memory
    assert memory is not None
    assert cut.memory is not None
    assert torch.equal(torch.cat([cut.memory.before, cut.tokens]), text.tokens[: len(cut.memory.before) + length])
    assert torch.equal(cut.memory.lines, memory.lines[: length - cut.prompt])
