"""A decoder layer as a short sequence of ops over flat rows: four products, attention, SwiGLU, rotary embedding, and
norms where its model family has them.

To support another family with Llama's products, feed-forward and rotary embedding, add an entry to `FUSED_FAMILIES`; it
serves targets and drafters.

Legend: rows = tokens of one forward, hidden = the model's width, dim = head_dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels.layers import Product, Weight, join
from kernels.ops import Ops
from kernels.tree_attention import MAX_DEPTH, KVRows

T = TypeVar("T")


class Norms(NamedTuple, Generic[T]):
    """One value for each position of a decoder layer that can have a norm; None where it has no norm."""

    attention_input: T
    attention_output: T  # applied before the output is added to the hidden states; so is `mlp_output`
    mlp_input: T
    mlp_output: T


PRE_NORM = Norms[str | None]("input_layernorm", None, "post_attention_layernorm", None)


@dataclass(frozen=True, slots=True)
class Family:
    """Differences of a model family's decoder layer from Llama's."""

    norms: Norms[str | None] = PRE_NORM  # module names in transformers
    query_key_norms: Literal["head", "projection"] | None = (
        None  # what a norm of queries or keys spans: each head, or the whole projection; None without such norms
    )
    query_key_value_bias: bool = False  # True: q, k and v have biases whatever `attention_bias` says


FUSED_FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(query_key_value_bias=True),
    "qwen3": Family(query_key_norms="head"),
    "olmo2": Family(
        Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"), query_key_norms="projection"
    ),
}
"""Model families whose layers can run as these ops, by their `model_type` in transformers."""


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rotary embedding of a forward's rows, and their keys and values by KV group, shared by all layers."""

    cos: Tensor  # [rows, dim], rotary embedding of the rows' positions
    sin: Tensor  # [rows, dim]
    groups: tuple[KVRows, ...]  # one for all layers, or one for layers without a window and one for those with one

    def of(self, window: int | None) -> KVRows:
        """Return the group of layers with this window."""
        return self.groups[0 if window is None else -1]


class RotaryTable:
    """Lookup table of the rotary embedding of all positions."""

    def __init__(self, embed: Callable[[Tensor], tuple[Tensor, Tensor]], max_positions: int, device: torch.device):
        """`embed` computes cos and sin of positions: [positions] int64 -> two tensors [positions, dim]."""
        # Tree nodes have positions beyond the longest sequence.
        self.table = torch.stack(embed(torch.arange(max_positions + MAX_DEPTH, device=device)))  # [2, positions, dim]

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Look up cos and sin of positions. # positions [rows] int64 -> both [rows, dim]"""
        cos, sin = self.table.index_select(1, positions)
        return cos, sin


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer: its planned weights, and the ops of their device that run it."""

    ops: Ops
    query_heads: int
    epsilon: float
    scale: float
    window: int | None
    norms: Norms[Tensor | None]  # [hidden] each
    query_key_value: Product
    head_norms: tuple[Tensor, Tensor] | None  # norm weights of queries and of keys, see `rotary_store`
    output: Product
    gate_up: Product
    down: Product

    @staticmethod
    def of(
        weights: Mapping[str, Weight],
        ops: Ops,
        family: Family,
        *,
        query_heads: int,
        epsilon: float,
        scale: float,
        window: int | None,
    ) -> "DecoderLayer":
        """Build a layer of a family from weights named as in transformers. Raises ValueError if weights are missing, or
        if there are others that the family does not have."""
        left = dict(weights)

        def joined(part: str, *names: str) -> Product:
            places = [f"{part}.{name}_proj" for name in names]
            found = [left.pop(f"{place}.weight") for place in places if f"{place}.weight" in left]
            biases = [vector(f"{place}.bias") for place in places if f"{place}.bias" in left]
            if len(found) < len(names) or len(biases) not in (0, len(names)):
                raise ValueError(f"{part}: weights of {', '.join(names)} are missing, or some of their biases")
            return ops.plan_linear(join(found), torch.cat(biases) if biases else None)

        def vector(name: str) -> Tensor:
            value = left.pop(name)
            assert isinstance(value, Tensor), "only matrices are quantised"
            return value

        query_norm, key_norm = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
        try:
            layer = DecoderLayer(
                ops,
                query_heads,
                epsilon,
                scale,
                window,
                norms=Norms(*(None if name is None else vector(f"{name}.weight") for name in family.norms)),
                query_key_value=joined("self_attn", *"qkv"),
                head_norms=(vector(query_norm), vector(key_norm)) if query_norm in left else None,
                output=joined("self_attn", "o"),
                gate_up=joined("mlp", "gate", "up"),
                down=joined("mlp", "down"),
            )
        except KeyError as error:
            raise ValueError(f"weight {error.args[0]} is missing") from error
        if left:
            raise ValueError(f"layers of this family have no such weights: {', '.join(sorted(left))}")
        return layer

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layer on hidden + delta. Adds `delta` and the attention output to `hidden` in place, and returns the
        feed-forward output, which the next layer adds as its `delta`.
        # hidden, delta [rows, hidden]; pool [2, slots, kv_heads, dim] -> like delta"""
        return self.rest(self.store(hidden, delta, places, pool), hidden, places, pool)

    def rest(self, query: Tensor, hidden: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the second part of the layer, after `store`: adds the attention output to `hidden` in place, and returns
        the feed-forward output. # query [rows, query heads, dim] -> like hidden"""
        attended = places.of(self.window).attention.attend(query, pool, scale=self.scale, window=self.window)
        delta = self.add_norm(self.output(attended.flatten(1)), None, self.norms.attention_output)
        x = self.add_norm(hidden, delta, self.norms.mlp_input)
        return self.add_norm(self.down(self.ops.silu_mul(self.gate_up(x))), None, self.norms.mlp_output)

    def store(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the first part of the layer: norm hidden + delta, project it, and store keys and values in the pool.
        # hidden, delta [rows, hidden] -> queries [rows, query heads, dim]"""
        return self.keep(self.add_norm(hidden, delta, self.norms.attention_input), places, pool)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add `delta` to `hidden` in place, and return the norm of the sum, or `hidden` itself if `norm` is None.
        # hidden, delta [rows, hidden], norm [hidden] -> like hidden"""
        if norm is not None:
            return self.ops.add_rms_norm(hidden, delta, norm, self.epsilon)
        return hidden if delta is None else hidden.add_(delta)

    def keep(self, x: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """Project normed hidden states, and store their keys and values in the pool.
        # x [rows, hidden] -> queries [rows, query heads, dim]"""
        joined, slots = self.query_key_value(x), places.of(self.window).slots
        return self.ops.rotary_store(
            joined, places.cos, places.sin, slots, pool, self.query_heads, self.head_norms, self.epsilon
        )
