"""A drafter's decoder layers and heads as they are trained, differentiable; the parameter names are transformers'.
Legend: batch, rows = entries of one sequence in one forward, hidden, dim = head_dim, heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.rotary import Rotary
from kernels.decoder_layer import FUSED_FAMILIES, Family, Norms
from kernels.layers import rotated

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> the target's embeddings of them [..., hidden]."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer, by its index, over a forward's rows and the keys before them: query
[batch, heads, rows, dim], key and value [batch, kv_heads, rows, dim] -> like query. Scores are scaled by dim^-1/2."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, both [batch, kv_heads, rows, dim]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes and variants of a drafter's decoder layers."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    biases: tuple[bool, bool, bool]  # biases in q, k and v; in the attention output; in the feed-forward
    family: Family
    rotary: Rotary

    @staticmethod
    def of(target: Mapping[str, Any]) -> "LayerShape":
        """Return the shape that a transformers config asks for."""
        family, hidden, heads = (
            FUSED_FAMILIES[target["model_type"]],
            target["hidden_size"],
            target["num_attention_heads"],
        )
        biased = bool(target.get("attention_bias"))
        head_dim = target.get("head_dim") or hidden // heads
        return LayerShape(
            hidden,
            target["intermediate_size"],
            heads,
            target.get("num_key_value_heads") or heads,
            head_dim,
            float(target.get("rms_norm_eps", 1e-6)),
            (biased or family.query_key_value_bias, biased, bool(target.get("mlp_bias"))),
            family,
            Rotary(target, head_dim),
        )


class Norm(nn.RMSNorm):
    """RMS norm in the type of its weight; of a wider input each part of the weight's width is normed alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm parts of the last dimension. # x [..., parts * width] -> like x"""
        return super().forward(x.to(self.weight.dtype).unflatten(-1, (-1, len(self.weight)))).flatten(-2)


class SelfAttention(nn.Module):
    """Self-attention with rotary positions; queries and keys are normed where the family does so."""

    def __init__(self, shape: LayerShape, extra: int = 0) -> None:
        """`extra`: width of the input that is read before the state."""
        super().__init__()
        joined, output, _ = shape.biases
        reads = extra + shape.hidden
        wide, narrow = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(reads, wide, bias=joined)
        self.k_proj = nn.Linear(reads, narrow, bias=joined)
        self.v_proj = nn.Linear(reads, narrow, bias=joined)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=output)
        dim, span = shape.head_dim, shape.family.query_key_norms
        self.q_norm = Norm(dim if span == "head" else wide, shape.epsilon) if span else nn.Identity()
        self.k_norm = Norm(dim if span == "head" else narrow, shape.epsilon) if span else nn.Identity()
        self._dim = dim

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Attend from each row. # x [batch, rows, extra + hidden] -> [batch, rows, hidden]"""
        query = self._by_head(self.q_norm(self.q_proj(x)))
        mixed = attend(rotated(query, *rotary).transpose(1, 2), *self.keys_values(x, rotary))
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        return output

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """Return the rows' keys and values. # x [batch, rows, extra + hidden] -> both [batch, kv_heads, rows, dim]"""
        key, value = self._by_head(self.k_norm(self.k_proj(x))), self._by_head(self.v_proj(x))
        return rotated(key, *rotary).transpose(1, 2), value.transpose(1, 2)

    def _by_head(self, joined: Tensor) -> Tensor:
        """# [batch, rows, heads * dim] -> [batch, rows, heads, dim]"""
        return joined.view(*joined.shape[:-1], -1, self._dim)


class FeedForward(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        bias = shape.biases[2]
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward. # x [..., hidden] -> [..., hidden]"""
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DrafterLayer(nn.Module):
    """A decoder layer of a family, the differentiable form of `kernels.decoder_layer`."""

    def __init__(self, shape: LayerShape, extra: int = 0, *, normed_residual: bool = False) -> None:
        """`normed_residual`: what the layer computes is added to the normed state."""
        super().__init__()
        self._normed_residual = normed_residual
        names = shape.family.norms
        before, after = self._add_norm(shape, names.attention_input), self._add_norm(shape, names.attention_output)
        self.self_attn = SelfAttention(shape, extra)
        self.norms = Norms(
            before, after, self._add_norm(shape, names.mlp_input), self._add_norm(shape, names.mlp_output)
        )
        self.mlp = FeedForward(shape)

    def _add_norm(self, shape: LayerShape, name: str | None) -> nn.Module:
        """Make the norm of that name; without a name, the identity."""
        if name is None:
            return nn.Identity()
        self.add_module(name, Norm(shape.hidden, shape.epsilon))
        return self.get_submodule(name)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        extra: Tensor | None = None,
    ) -> Tensor:
        """Run the layer; attention reads `extra` before the normed state.
        # hidden [batch, rows, hidden], extra [batch, rows, extra] -> [batch, rows, hidden]"""
        norms = self.norms
        normed = norms.attention_input(hidden)
        read = normed if extra is None else torch.cat([extra, normed], dim=-1)
        hidden = (normed if self._normed_residual else hidden) + norms.attention_output(
            self.self_attn(read, rotary, attend)
        )
        output: Tensor = hidden + norms.mlp_output(self.mlp(norms.mlp_input(hidden)))
        return output


class DrafterDecoder(nn.Module):
    """Layers and the output norm. The first layer reads `extra` values before the state, and may add to the normed
    state (`normed_residual`)."""

    def __init__(self, shape: LayerShape, num_layers: int, extra: int = 0, *, normed_residual: bool = False) -> None:
        super().__init__()
        self.shape = shape
        first = [DrafterLayer(shape, extra, normed_residual=normed_residual) for _ in range(min(1, num_layers))]
        self.layers = nn.ModuleList([*first, *(DrafterLayer(shape) for _ in range(1, num_layers))])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)


class Input(nn.Module, ABC):
    """Base class of input layers: from tapped features and tokens to the first inputs of blocks."""

    is_solved: ClassVar[bool] = True  # training starts from a regression, by `solve`; False: from `start`
    condition_proj: nn.Linear
    feature_norms: nn.ModuleList  # one for each tap, or none

    def condition(self, features: Tensor) -> Tensor:
        """Return c, one vector made of all taps, each normed first where there are norms.
        # features [..., taps * hidden] -> [..., hidden]"""
        features = features.to(self.condition_proj.weight.dtype)
        if self.feature_norms:
            taps = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.feature_norms, taps, strict=True)], dim=-1)
        projected: Tensor = self.condition_proj(features)
        return projected

    @abstractmethod
    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return the first layer's input for some entries of each anchor's block, from the anchor's condition (or the
        state that a further block starts at) and the embedding of the token after it.
        # context, embedded [..., hidden] -> [..., entries, width]"""

    def solve(self, sums: Any, generator: torch.Generator) -> None:
        """Set all weights by the regression of `InputSums`."""
        raise AssertionError("this input is not solved")

    def start(self, embed: Embed) -> None:
        """Set the weights that training does not, if `is_solved` is False."""
