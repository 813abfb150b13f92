"""Replay against drafters whose tau is known beforehand."""

from dataclasses import replace
from heapq import heapify, heappop, heappush

import pytest
import torch

from drafters.network.model import SpecBlock
from drafters.training.corpus import TOP, Batch, Example
from drafters.training.forward import TrainingForward
from drafters.training.replay import (
    examine,
    replay_beside_memory,
    replay_blocks,
    replay_memory,
    replay_trees,
    serving,
)
from kernels.sample import gumbel_noise_of
from tests.drafters.network.parts import tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, always_says, repeating_example, trainable_drafter

EMBED = tiny_embedding(HIDDEN)


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


def test_blocks_at_every_other_position() -> None:
    right, token = drafter(right=True)
    text = repeating_example(token, 20)
    starts = range(text.prompt + 1, text.length + 1, 2)  # the position each block drafts first
    assert replay_blocks(right, EMBED, text, every=2, nodes=BLOCK).steps == len(starts)
    assert replay_blocks(right, EMBED, text, every=2, nodes=BLOCK).tokens == sum(
        1 + min(BLOCK, max(0, text.length - start)) for start in starts
    )
    wrong, _ = drafter(right=False)
    assert replay_blocks(wrong, EMBED, text, every=3, nodes=BLOCK).tau == 1.0


def best_first(chances: torch.Tensor, nodes: int) -> set[tuple[int, ...]]:
    """The likeliest paths of a block, found one after the other. # chances [block, vocab]"""
    waiting: list[tuple[float, tuple[int, ...]]] = [
        (-float(chance), (token,)) for token, chance in enumerate(chances[0])
    ]
    heapify(waiting)
    found: set[tuple[int, ...]] = set()
    while len(found) < nodes:
        chance, path = heappop(waiting)
        found.add(path)
        if len(path) < len(chances):
            for token, factor in enumerate(chances[len(path)]):
                heappush(waiting, (chance * float(factor), (*path, token)))
    return found


@pytest.mark.parametrize("nodes", [1, 4, 9])
@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 5), (1.0, 5), (0.5, -(2**63)), (1.0, None)])
def test_blocks_are_trees_of_their_likeliest_paths(nodes: int, temperature: float, seed: int | None) -> None:
    """Ranked with the noise of the text, as they are served; without it where its seed is not known."""
    model = trainable_drafter()
    base = repeating_example(0, 24)
    tokens = model.d2t[torch.randint(6, (24,), generator=torch.Generator().manual_seed(3))]
    text = replace(base, tokens=tokens, temperature=temperature, seed=seed, start=100)
    anchors = torch.arange(text.prompt - 1, text.length - 1)[None]
    _, blocks = TrainingForward(model, EMBED).first(Batch.of([text], 2 * BLOCK, torch.device("cpu")), anchors)
    states = blocks.states[0]
    emitted = 0
    for anchor, logits in zip(anchors[0].tolist(), model.lm_head(states).detach(), strict=True):
        if seed is not None and temperature:
            positions = 100 + anchor + 2 + torch.arange(BLOCK)
            noise = gumbel_noise_of(torch.full_like(positions, seed), positions, model.d2t)
            logits = logits / temperature + noise
        tree = best_first(logits.double().softmax(-1), nodes)
        wanted = model.t2d[tokens[anchor + 2 : anchor + 2 + BLOCK]].tolist()
        emitted += 1 + sum(tuple(wanted[:depth]) in tree for depth in range(1, len(wanted) + 1))
    assert replay_blocks(model, EMBED, text, every=1, nodes=nodes).tokens == emitted


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


def test_copies_are_counted_as_steps_one_behind_the_other() -> None:
    """A text that repeats a phrase: once it has been written, steps copy eight tokens at a time."""
    phrase = torch.arange(8) + 5
    text = Example(phrase.repeat(12), torch.zeros(96, 3 * HIDDEN), 2, torch.zeros(95, TOP).int(), torch.zeros(95, TOP))
    done = replay_memory(text, every=1, nodes=8)
    assert done.tokens >= 94
    assert 4.0 < done.tau <= 9.0


@pytest.mark.parametrize("right", [True, False])
def test_beside_memory_the_better_of_both_counts(right: bool) -> None:
    """One token throughout: copies have it right all along, and a drafter that is wrong takes nothing from them."""
    model, token = drafter(right=right)
    text = repeating_example(token, 40)
    copies = replay_memory(text, every=1, nodes=8)
    assert copies.tau > 2.0
    assert replay_beside_memory(model, EMBED, text, every=1, nodes=8).tau >= copies.tau
