"""Modules of targets draft what transformers' own MTP drafts, token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

from drafters import folders as published
from drafters.network.checkpoint import DrafterError, weights_of
from tests.drafters.network.test_serving_equals_training import assert_equal_blocks
from tests.drafters.test_published import TEXT, spoken, tapped
from tests.published_forms import LAYERS, WITH_MODULES, parts_of, with_module
from tests.tiny_models import stock


@pytest.fixture(autouse=True)
def read_as_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers knows GLM's module by the number of its layer, of the published sizes only."""
    monkeypatch.setattr(Glm4MoePreTrainedModel, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}\."])


@torch.no_grad()
def reference(oracle: PreTrainedModel, count: int, more: int) -> Tensor:
    """Logits of the drafts by transformers: behind so many positions of TEXT and the token after them, and then behind
    the likeliest tokens. # -> [1 + more, vocab]"""
    module = MtpModel.from_pretrained(oracle)
    states = oracle(TEXT[None, :count], output_hidden_states=True).hidden_states[-1]
    cache, tokens, positions = MtpCache(config=oracle.config.get_mtp_config()), TEXT[1 : count + 1], count + 1
    states = module.forward_layer(0, states, torch.arange(1, positions)[None], cache, input_ids=tokens[None])
    logits = [module._project_to_logits(states[0, -1])]
    for step in range(more):
        token, at = logits[-1].argmax().view(1, 1), torch.tensor([[positions + step]])
        states = module.forward_layer(0, states[:, -1:], at, cache, input_ids=token)
        logits.append(module._project_to_logits(states[0, -1]))
    return torch.stack(logits)


@pytest.mark.parametrize("family", WITH_MODULES)
def test_it_drafts_as_in_transformers(tmp_path: Path, family: str) -> None:
    """Behind a text, and behind its own drafts."""
    oracle = stock(with_module(tmp_path, family))
    assert published.kind_of(tmp_path) == "mtp"
    parts = parts_of(oracle)
    model = published.load(tmp_path, parts, dtype=torch.float32, device="cpu")
    features = tapped(oracle, TEXT, model.config.tap_layers)
    for count in (1, 4, len(TEXT) - 1):
        expected = reference(oracle, count, 3)
        logits = spoken(model, parts.embedding, features, TEXT, count, expected[:-1].argmax(-1))
        assert (logits - expected).abs().max() < 1e-4 * expected.std()
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", WITH_MODULES)
def test_its_states_in_training_are_those_of_serving(tmp_path: Path, family: str) -> None:
    parts = parts_of(stock(with_module(tmp_path, family)))
    assert_equal_blocks(published.load(tmp_path, parts, dtype=torch.float32, device="cpu"))


def test_it_drafts_the_tokens_that_transformers_drafts_while_it_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle: Any = stock(with_module(tmp_path, "glm4_moe"))
    parts, drafted, ends = parts_of(oracle), list[int](), list[int]()
    draft = MtpModel.forward

    def kept(self: MtpModel, full_input_ids: Tensor, **given: Any) -> Any:
        found = draft(self, full_input_ids=full_input_ids, **given)
        drafted.append(int(found[0]))
        ends.append(full_input_ids.shape[1])
        return found

    monkeypatch.setattr(MtpModel, "forward", kept)
    text = oracle.generate(TEXT[None], use_mtp=True, do_sample=False, max_new_tokens=12, eos_token_id=None)[0]
    model = published.load(tmp_path, parts, dtype=torch.float32, device="cpu")
    features = tapped(oracle, text, model.config.tap_layers)
    ours = [int(spoken(model, parts.embedding, features, text, end - 1).argmax()) for end in ends]
    assert len(drafted) > 4
    assert ours == drafted


def test_a_copy_of_a_target_without_its_module_has_no_drafter(tmp_path: Path) -> None:
    folder = with_module(tmp_path, "glm4_moe")
    file = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if f"layers.{LAYERS}." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    assert published.form_of(folder) is None


def test_several_modules_are_refused(tmp_path: Path) -> None:
    folder = with_module(tmp_path, "glm4_moe")
    parts, described = parts_of(stock(folder)), json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"num_nextn_predict_layers": 2}))
    with pytest.raises(DrafterError, match="it has 2 modules, and only one is supported"):
        published.load(folder, parts, dtype=torch.float32, device="cpu")


def test_it_is_read_beside_other_modalities(tmp_path: Path) -> None:
    parts = parts_of(stock(with_module(tmp_path, "qwen3_5_text")))
    expected = weights_of(published.load(tmp_path, parts, dtype=torch.float32, device="cpu"))
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": json.loads(config.read_text())}))
    tensors = {name.replace("model.", "model.language_model."): value for name, value in load_file(file).items()}
    save_file(tensors, file)
    found = weights_of(published.load(tmp_path, parts, dtype=torch.float32, device="cpu"))
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
