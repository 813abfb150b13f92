"""Modules of targets draft what transformers' own MTP drafts, token by token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

from drafters import folders as published
from service.engine.weights import LoadedModel
from tests.drafters.test_published import TEXT, spoken, tapped
from tests.published_forms import LAYERS, glm
from tests.tiny_models import load, stock


@torch.no_grad()
def reference(oracle: PreTrainedModel, count: int, more: int) -> tuple[Tensor, Tensor]:
    """What transformers drafts behind so many positions of TEXT and the token after them: the likeliest of each step,
    and all logits. # -> [more] int64, [1 + more, vocab]"""
    module = MtpModel.from_pretrained(oracle)
    states = oracle(TEXT[None, :count], output_hidden_states=True).hidden_states[-1]
    cache, tokens, positions = MtpCache(config=oracle.config.get_mtp_config()), TEXT[None, 1 : count + 1], count + 1
    states = module.forward_layer(0, states, torch.arange(1, positions)[None], cache, input_ids=tokens)
    logits = [module._project_to_logits(states[0, -1])]
    for step in range(more):
        token = logits[-1].argmax().view(1, 1)
        at = torch.tensor([[positions + step]])
        states = module.forward_layer(0, states[:, -1:], at, cache, input_ids=token)
        logits.append(module._project_to_logits(states[0, -1]))
    found = torch.stack(logits)
    return found[:-1].argmax(-1), found


def assert_alike(folder: Path, oracle: PreTrainedModel, loaded: LoadedModel) -> None:
    assert published.kind_of(folder) == "mtp"
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    features = tapped(oracle, TEXT, model.config.tap_layers)
    for count in (1, 4, len(TEXT) - 1):
        drafted, expected = reference(oracle, count, 3)
        logits = spoken(model, loaded, features, TEXT, count, drafted)
        assert (logits - expected).abs().max() < 1e-4 * expected.std()
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.fixture
def read_as_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows the module by the number of its layer, of the published sizes only."""
    monkeypatch.setattr(Glm4MoePreTrainedModel, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\."])


@pytest.mark.usefixtures("read_as_module")
def test_the_module_of_glm_drafts_as_in_transformers(tmp_path: Path) -> None:
    folder = glm(tmp_path)
    assert_alike(folder, stock(folder), load(folder))
