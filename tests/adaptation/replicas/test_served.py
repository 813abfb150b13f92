"""Weights as bytes: equal if and only if the weights are, and nothing else is taken for them."""

import hashlib
from pathlib import Path

import pytest
import torch

from adaptation.checkpoint import layout_of
from adaptation.records import Refused
from adaptation.replicas.served import ServedWeights, weights_as_bytes, weights_from_bytes
from drafters.specblock.weights import VOCABULARY, weights_of
from tests.adaptation.drafts import same
from tests.adaptation.samples import bench, drafter
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("impatient")


def test_equal_weights_are_equal_bytes_in_whatever_order() -> None:
    weights = weights_of(drafter())
    backwards = dict(reversed(weights.items()))
    assert weights_as_bytes(weights) == weights_as_bytes(backwards) == weights_as_bytes(weights_of(drafter()))
    assert weights_as_bytes(weights) != weights_as_bytes(weights_of(drafter(1)))


def test_each_version_is_hashed_once_and_known_by_its_hash(tmp_path: Path) -> None:
    tried = bench(tmp_path)
    served = ServedWeights(tried.weights)
    first = served.now()
    assert served.now() is first
    assert (first.version, served.sha256_of(0), served.version_of(first.sha256)) == (0, first.sha256, 0)
    tried.learner.adopt(weights_of(drafter(1)))
    second = served.now()  # on its way to be served
    assert (second.version, served.last_seen) == (1, second)
    assert served.version_of(first.sha256) == -1
    assert (served.sha256_of(0), served.sha256_of(1), served.sha256_of(7)) == (first.sha256, second.sha256, "")
    tried.learner.rollback()
    assert served.now().sha256 == first.sha256
    assert served.version_of(first.sha256) == 2


def test_what_was_sent_is_what_arrives(tmp_path: Path) -> None:
    tried = bench(tmp_path)
    now = ServedWeights(tried.weights).now()
    assert same(weights_from_bytes(now.data, now.sha256, tried.weights.layout, VOCAB_SIZE), weights_of(drafter()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_say_of_what_type_they_are(dtype: torch.dtype) -> None:
    weights = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in weights_of(drafter()).items()
    }
    data = weights_as_bytes(weights)
    sha256 = hashlib.sha256(data).hexdigest()
    assert same(weights_from_bytes(data, sha256, layout_of(weights), VOCAB_SIZE), weights)
    others = {name: (shape, torch.float16) for name, (shape, _) in layout_of(weights).items()}
    with pytest.raises(Refused, match="types") as refused:
        weights_from_bytes(data, sha256, others, VOCAB_SIZE)
    assert refused.value.reason == "misfit"


def test_bytes_that_are_no_weights_are_refused() -> None:
    for data in (b"", b"no weights at all", bytes(100)):
        with pytest.raises(Refused) as refused:
            weights_from_bytes(data, hashlib.sha256(data).hexdigest(), {}, VOCAB_SIZE)
        assert refused.value.reason == "misfit"


def test_weights_for_tokens_that_there_are_not_are_refused() -> None:
    for place, token in ((0, VOCAB_SIZE), (3, -1), (1, int(drafter().d2t[0]))):
        weights = {name: value.clone() for name, value in weights_of(drafter()).items()}
        weights[VOCABULARY][place] = token
        data = weights_as_bytes(weights)
        with pytest.raises(Refused, match="tokens") as refused:
            weights_from_bytes(data, hashlib.sha256(data).hexdigest(), layout_of(weights), VOCAB_SIZE)
        assert refused.value.reason == "misfit"
