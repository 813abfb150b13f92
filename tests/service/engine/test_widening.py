"""A widened model says what the one it was made of says, and is drafted for by the same drafter."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import PreTrainedModel

from service.assembly import assemble, refuse_widened
from service.bench.driver import generate
from service.bench.experiment import Measure, mismatches, plain_engine, requests_from, tau
from service.config import ServiceConfig
from service.engine.kv_pool import KVPool, KVShape
from service.engine.modules import ATTENTION_NAME
from service.engine.target import Target
from service.engine.widening import widened
from service.errors import StartupError
from tests.service.bench.parts import varied_prompts
from tests.tiny_models import loaded_tiny

torch.set_num_threads(1)

PROMPTS = varied_prompts()[:3]


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_copy_computes_what_the_one_did(family: str, copies: int) -> None:
    model = loaded_tiny(family).model
    wide = widened(model, copies)
    tokens = torch.arange(40)[None] % model.config.vocab_size
    expected = logits(model, tokens)
    torch.testing.assert_close(logits(wide, tokens), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    assert sum(p.numel() for p in wide.parameters()) > copies * sum(p.numel() for p in model.parameters())


def test_other_families_are_refused_by_name() -> None:
    with pytest.raises(StartupError, match=r"gemma.*llama, mistral, qwen2, qwen3"):
        widened(loaded_tiny("gemma3").model, 2)


@pytest.mark.parametrize(
    "model",
    ["widen(smollm2-135m, 3)", "widen(smollm2-135m, 1)", "widen(smollm2-135m)", "widen(2", "widen(widen(m, 2), 2)"],
)
def test_other_factors_are_refused_with_an_example(model: str) -> None:
    with pytest.raises(ValidationError, match=r"as in widen\(smollm2-135m, 2\)"):
        ServiceConfig(model=model)


@pytest.mark.parametrize(
    ("model", "source", "copies", "name"),
    [
        ("widen(smollm2-135m, 4)", "smollm2-135m", 4, "widen(smollm2-135m, 4)"),
        ("widen(org/model@main,2)", "org/model", 2, "widen(org/model, 2)"),
        ("widen(/models/some.gguf, 2)", "/models/some.gguf", 2, "widen(some, 2)"),
        ("smollm2-135m", "smollm2-135m", 1, "smollm2-135m"),
    ],
)
def test_what_is_widened_is_named_as_alone(model: str, source: str, copies: int, name: str) -> None:
    config = ServiceConfig(model=model)
    assert (config.model_source, config.copies, config.public_model_name) == (source, copies, name)


@pytest.mark.parametrize("model", ["widen(dummy(tiny), 2)", "dummy(widen(tiny, 2))", "dummy()", "dummy(tiny"])
def test_random_weights_have_a_shape_and_are_not_widened(model: str) -> None:
    with pytest.raises(ValidationError, match=r"as in (widen|dummy)"):
        ServiceConfig(model=model)


def test_drafters_are_trained_for_models_as_they_are() -> None:
    with pytest.raises(StartupError, match="set model to smollm2-135m"):
        refuse_widened(ServiceConfig(model="widen(smollm2-135m, 2)"))


def test_layers_that_are_no_standard_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules would hand the drafter all copies."""
    wide = widened(loaded_tiny("llama").model, 2).eval()
    wide.set_attn_implementation(ATTENTION_NAME)
    config = wide.config
    shape = KVShape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, torch.float32)
    monkeypatch.setattr("service.engine.decoder._difference", lambda *trial: "layer 0 is no standard one")
    with pytest.raises(StartupError, match="cannot be widened: layer 0"):
        Target(wide, KVPool(shape, 64, wide.device), tap_layers=(0,))


@pytest.mark.slow
def test_the_embedded_model_accepts_as_much_and_says_the_same_with_drafts(tmp_path: Path) -> None:
    found = {}
    for model in ("smollm2-135m", "widen(smollm2-135m, 2)"):
        assembly = assemble(ServiceConfig(model=model, budget_policy="fixed", max_budget=8, state_dir=tmp_path))
        runs = {}
        for temperature in (0.0, 1.0):
            requests = requests_from(PROMPTS, 0, Measure(temperature, 64, len(PROMPTS), seed=1))
            plain, drafted = (generate(engine, requests) for engine in (plain_engine(assembly), assembly.engine()))
            assert mismatches([plain], [drafted]) == 0
            runs[temperature] = tau([drafted])
        found[model] = runs[0.0], assembly.fingerprint, assembly.loaded.identity, assembly.loaded.parts.identity
    (narrow, wide) = found.values()
    assert wide[0] == pytest.approx(narrow[0], rel=0.05)
    assert (wide[1] != narrow[1], wide[2] != narrow[2], wide[3] == narrow[3]) == (True, True, True)
