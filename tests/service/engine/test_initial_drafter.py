"""A drafter's layers are those of its target, or Llama's in its sizes."""

import pytest

from kernels.families import OF_DRAFTERS
from service.engine.initial_drafter import layers_for
from tests.tiny_models import FAMILIES, stock_tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_every_target_has_layers_for_its_drafter(family: str) -> None:
    text = stock_tiny(family).config.get_text_config()
    layers = layers_for(text)
    assert layers["model_type"] == (family if family in OF_DRAFTERS else "llama")
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert {name: layers[name] for name in names if hasattr(text, name)} == {
        name: getattr(text, name) for name in names if hasattr(text, name)
    }
