"""Features against transformers' own attention, for every family; shards that are kept, grown and refused."""

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.training.corpus import TOP, Shard
from service.engine.modules import decoder_layers
from service.errors import StartupError
from service.learning.features import SHARD_SEQUENCES, FeatureReader, write_shards
from service.learning.regenerate import Response
from tests.tiny_models import FAMILIES, WINDOW, load, random_prompts, stock_tiny, tiny_model

TAPS = (0, 2)


def responses(count: int, *, length: int = 20, seed: int = 0) -> list[Response]:
    """Texts of several lengths, some longer than a sliding window."""
    return [
        Response(id=f"r-{number}", temperature=0.0, prompt=tokens[: 4 + number % 3], response=tokens[4 + number % 3 :])
        for number in range(count)
        for tokens in random_prompts(1, length + 7 * (number % 4), seed=seed + number)
    ]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    return reader_of("llama", tmp_path_factory.mktemp("llama"))


def reader_of(family: str, folder: Path) -> FeatureReader:
    return FeatureReader(load(tiny_model(family, folder)).model, TAPS, batch_tokens=100)


def expected(family: str, response: Response) -> tuple[Tensor, Tensor]:
    """Layer outputs and log-probabilities of one text by the stock model."""
    model = stock_tiny(family)
    found: dict[int, Tensor] = {}
    hooks = [
        decoder_layers(model)[tap].register_forward_hook(lambda m, a, output, tap=tap: found.update({tap: output[0]}))
        for tap in TAPS
    ]
    logits = model(input_ids=torch.tensor([response.prompt + response.response]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.cat([found[tap] for tap in TAPS], -1), logits[len(response.prompt) - 1 :].float().log_softmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_and_labels_are_the_models_own(family: str, tmp_path: Path) -> None:
    texts = responses(6)
    assert max(text.num_tokens for text in texts) > WINDOW
    shard = reader_of(family, tmp_path).read(texts)
    token = label = 0
    for text in texts:
        wanted, logprobs = expected(family, text)
        got = shard.features[token : token + text.num_tokens].float()
        assert (got - wanted).abs().max() < 0.01 * wanted.abs().max()
        labels = len(text.response) + 1
        ids, values = shard.top_ids[label : label + labels].long(), shard.top_logprobs[label : label + labels].float()
        assert (logprobs.gather(1, ids) - values).abs().max() < 0.02
        assert (values[:, -1] - logprobs.topk(TOP).values[:, -1]).abs().max() < 0.02
        assert shard.tokens[token : token + text.num_tokens].tolist() == text.prompt + text.response
        token, label = token + text.num_tokens, label + labels
    assert (token, label) == (shard.tokens.shape[0], shard.top_ids.shape[0])


def test_shards_hold_all_texts_and_are_kept(reader: FeatureReader, tmp_path: Path) -> None:
    texts = responses(SHARD_SEQUENCES + 3)
    chunks = list(write_shards(reader, texts, tmp_path))
    assert [len(chunk) for chunk in chunks] == [SHARD_SEQUENCES, 3]
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["shard00000.safetensors", "shard00001.safetensors"]
    before = [file.stat().st_mtime_ns for file in files]
    more = [*texts, *responses(2, seed=500)]
    assert len(list(write_shards(reader, more, tmp_path))) == 2
    after = [file.stat().st_mtime_ns for file in files]
    assert before[0] == after[0]  # full: kept
    assert before[1] != after[1]  # grown
    assert Shard.load(files[1]).lengths.tolist() == [text.num_tokens for text in more[SHARD_SEQUENCES:]]


def test_a_broken_off_shard_is_made_again(reader: FeatureReader, tmp_path: Path) -> None:
    texts = responses(3)
    (tmp_path / ".unfinished-shard00000.safetensors").write_bytes(b"torn")
    list(write_shards(reader, texts, tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["shard00000.safetensors"]
    (tmp_path / "shard00000.safetensors").write_bytes(b"torn")
    with pytest.raises(StartupError, match="delete it"):
        list(write_shards(reader, texts, tmp_path))


def test_shards_of_other_texts_are_refused(reader: FeatureReader, tmp_path: Path) -> None:
    list(write_shards(reader, responses(3), tmp_path))
    with pytest.raises(StartupError, match="holds other texts"):
        list(write_shards(reader, responses(3, seed=9), tmp_path))


def test_tokens_that_the_target_does_not_have_are_refused(reader: FeatureReader, tmp_path: Path) -> None:
    foreign = Response(id="x-1", temperature=0.0, prompt=[5], response=[1, 2, 3, 49_000])
    with pytest.raises(StartupError, match="response x-1: token 49000, but this target has 320"):
        list(write_shards(reader, [foreign], tmp_path))


def test_a_full_disk_is_seen_before_the_work(
    reader: FeatureReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000))
    with pytest.raises(StartupError, match="fewer responses"):
        list(write_shards(reader, responses(3), tmp_path))
    assert list(tmp_path.iterdir()) == []
