"""Model families whose decoder layers run as a list of ops (`decoder_layer.py`), for targets and for drafters. A family
with Llama's products, feed-forward and rotary embedding is added by an entry of `FUSED_FAMILIES`."""

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

T = TypeVar("T")


class Norms(NamedTuple, Generic[T]):
    """A value for each position in a decoder layer that can have a norm; None where the layer has none."""

    attention_input: T
    attention_output: T  # before it is added to the hidden states, as that of the feed-forward
    mlp_input: T
    mlp_output: T


PRE_NORM = Norms[str | None]("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's decoder layer differs from Llama's."""

    norms: Norms[str | None] = PRE_NORM  # their names in transformers
    query_key_norms: Literal["head", "projection"] | None = None  # what one norm of queries and of keys spans
    query_key_value_bias: bool = False  # whether these products have biases whatever `attention_bias` says


FUSED_FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(query_key_value_bias=True),
    "qwen3": Family(query_key_norms="head"),
    "olmo2": Family(
        Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), query_key_norms="projection"
    ),
}
"""Families by their `model_type` in transformers."""
