"""Shards, examples, batches, and the texts kept apart."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.training.corpus import (
    TOP,
    Batch,
    Example,
    Shard,
    TrainingError,
    batches,
    by_length,
    frequent_tokens,
    held_out,
    load_examples,
)
from tests.drafters.training.parts import random_shard


@pytest.fixture
def corpus(tmp_path: Path) -> list[Example]:
    random_shard(10).save(tmp_path / "a.safetensors")
    random_shard(7, seed=1).save(tmp_path / "b.safetensors")
    return load_examples([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], max_length=512)


def test_a_shard_comes_back_as_it_was(tmp_path: Path) -> None:
    shard = random_shard(5)
    shard.save(tmp_path / "a.safetensors")
    again = Shard.load(tmp_path / "a.safetensors")
    assert all(torch.equal(getattr(again, name), getattr(shard, name)) for name in Shard.__slots__)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_examples_are_the_shards_sequences(corpus: list[Example]) -> None:
    shard = random_shard(10)
    assert len(corpus) == 17
    assert torch.equal(torch.cat([e.tokens for e in corpus[:10]]), shard.tokens.long())
    assert torch.equal(torch.cat([e.top_ids for e in corpus[:10]]), shard.top_ids)
    assert [e.temperature for e in corpus[:10]] == shard.temps.tolist()


@pytest.mark.parametrize("most", [2, 7, 12, 20, 512])
def test_of_long_texts_the_beginning_is_left_out_and_then_the_end(tmp_path: Path, most: int) -> None:
    random_shard(12).save(tmp_path / "a.safetensors")
    whole = load_examples([tmp_path / "a.safetensors"], max_length=512)
    cut = load_examples([tmp_path / "a.safetensors"], max_length=most)
    for one, all_of_it in zip(cut, whole, strict=True):
        assert one.length == min(most, all_of_it.length)
        left_out = min(all_of_it.prompt - 1, all_of_it.length - one.length)
        assert (one.prompt, one.start) == (all_of_it.prompt - left_out, left_out)
        assert torch.equal(one.tokens, all_of_it.tokens[left_out:][: one.length])
        assert torch.equal(one.features, all_of_it.features[left_out:][: one.length])
        answered = one.length - one.prompt
        assert answered == min(all_of_it.length - all_of_it.prompt, most - 1)
        assert torch.equal(one.top_ids, all_of_it.top_ids[: answered + 1])


def test_texts_without_response_are_left_out(tmp_path: Path) -> None:
    shard = random_shard(4)
    replace(shard, prompts=shard.lengths.clone()).save(tmp_path / "a.safetensors")
    assert load_examples([tmp_path / "a.safetensors"], max_length=512) == []


def test_a_batch_knows_the_label_of_every_position(corpus: list[Example]) -> None:
    group = corpus[:3]
    batch = Batch.of(group, 8, "cpu")
    for line, example in enumerate(group):
        index = batch.label_index[line]
        labelled = (index >= 0).nonzero().flatten().tolist()
        assert labelled == list(range(example.prompt, example.length + 1))
        assert torch.equal(batch.top_ids[index[labelled]], example.top_ids.long())
        assert torch.equal(batch.tokens[line, : example.length], example.tokens)
    assert batch.num_tokens == sum(e.length for e in group)


def test_an_epoch_has_every_example_once_and_another_order_each_time(corpus: list[Example]) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = ([id(e) for g in batches(corpus, tokens=100, generator=generator) for e in g] for _ in "ab")
    assert sorted(first) == sorted(second) == sorted(id(e) for e in corpus)
    assert first != second
    groups = list(batches(corpus, tokens=100, generator=generator))
    assert all(max(e.length for e in group) * len(group) <= 100 for group in groups)


def test_answers_to_one_prompt_are_kept_apart_together(corpus: list[Example]) -> None:
    twice = [*corpus, *corpus]
    trained, apart = held_out(twice, share=0.2, most=3)
    assert {e.prompt_digest for e in trained}.isdisjoint({e.prompt_digest for e in apart})
    assert len(apart) == 6
    assert len(trained) == 28
    again = held_out(twice[::-1], share=0.2, most=3)[1]
    assert {e.prompt_digest for e in again} == {e.prompt_digest for e in apart}


def example(prompt: list[int], response: list[int], likely: list[int]) -> Example:
    """Labels put half of the odds on each of two tokens."""
    labels = len(response) + 1
    logprobs = torch.full((labels, TOP), -30.0)
    logprobs[:, :2] = torch.tensor(0.5).log()
    ids = torch.arange(TOP).expand(labels, -1).clone()
    ids[:, :2] = torch.tensor(likely)
    return Example(torch.tensor(prompt + response), torch.zeros(1), len(prompt), ids, logprobs)


def test_written_and_likely_tokens_count_and_prompts_do_not() -> None:
    text = example([90] * 20, [70, 70, 71, 72], [80, 81])
    assert frequent_tokens([text], vocab_size=100, size=3).tolist() == [70, 80, 81]
    assert frequent_tokens([text], vocab_size=100, size=5).tolist() == [70, 71, 72, 80, 81]


def test_no_more_tokens_than_there_are() -> None:
    text = example([1], [2, 3, 4], [5, 6])
    assert frequent_tokens([text], vocab_size=70, size=8192).tolist() == list(range(70))


def test_tokens_of_another_target_are_refused() -> None:
    with pytest.raises(TrainingError, match="token 99, but the target has 80"):
        frequent_tokens([example([1], [99, 3], [5, 6])], vocab_size=80, size=10)


def test_texts_of_similar_length_go_together_and_a_long_one_alone() -> None:
    assert list(by_length([5, 90, 6, 40, 200, 41], 100)) == [[0, 2], [3, 5], [1], [4]]
