"""Shards, examples, batches, and the texts kept apart."""

from pathlib import Path

import pytest
import torch

from drafters.training.corpus import Batch, Corpus, Shard, batches, held_out
from tests.drafters.training.parts import random_shard


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    random_shard(10).save(tmp_path / "a.safetensors")
    random_shard(7, seed=1).save(tmp_path / "b.safetensors")
    return Corpus([tmp_path / "a.safetensors", tmp_path / "b.safetensors"], max_length=512)


def test_a_shard_comes_back_as_it_was(tmp_path: Path) -> None:
    shard = random_shard(5)
    shard.save(tmp_path / "a.safetensors")
    again = Shard.load(tmp_path / "a.safetensors")
    assert all(torch.equal(getattr(again, name), getattr(shard, name)) for name in Shard.__slots__)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_examples_are_the_shards_sequences(corpus: Corpus) -> None:
    shard = random_shard(10)
    assert len(corpus.examples) == 17
    assert torch.equal(torch.cat([e.tokens for e in corpus.examples[:10]]), shard.tokens.long())
    assert torch.equal(torch.cat([e.top_ids for e in corpus.examples[:10]]), shard.top_ids)
    assert [e.temperature for e in corpus.examples[:10]] == shard.temps.tolist()


def test_long_texts_are_cut_and_those_without_response_left_out(tmp_path: Path) -> None:
    random_shard(4).save(tmp_path / "a.safetensors")
    cut = Corpus([tmp_path / "a.safetensors"], max_length=7).examples
    assert [(e.length, e.prompt, e.top_ids.shape[0]) for e in cut] == [(7, 6, 2), (7, 6, 2)]


def test_a_batch_knows_the_label_of_every_position(corpus: Corpus) -> None:
    group = corpus.examples[:3]
    batch = Batch.of(group, 8, "cpu")
    for line, example in enumerate(group):
        index = batch.label_index[line]
        labelled = (index >= 0).nonzero().flatten().tolist()
        assert labelled == list(range(example.prompt, example.length + 1))
        assert torch.equal(batch.top_ids[index[labelled]], example.top_ids.long())
        assert torch.equal(batch.tokens[line, : example.length], example.tokens)
    assert batch.num_tokens == sum(e.length for e in group)


def test_an_epoch_has_every_example_once_and_another_order_each_time(corpus: Corpus) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        [id(e) for g in batches(corpus.examples, tokens=100, generator=generator) for e in g] for _ in "ab"
    )
    assert sorted(first) == sorted(second) == sorted(id(e) for e in corpus.examples)
    assert first != second
    groups = list(batches(corpus.examples, tokens=100, generator=generator))
    assert all(max(e.length for e in group) * len(group) <= 100 for group in groups)


def test_answers_to_one_prompt_are_kept_apart_together(corpus: Corpus) -> None:
    twice = [*corpus.examples, *corpus.examples]
    trained, apart = held_out(twice, share=0.2, most=3)
    assert {e.prompt_digest for e in trained}.isdisjoint({e.prompt_digest for e in apart})
    assert len(apart) == 6
    assert len(trained) == 28
    again = held_out(twice[::-1], share=0.2, most=3)[1]
    assert {e.prompt_digest for e in again} == {e.prompt_digest for e in apart}
