"""A drafter's decoder layers in their differentiable form for training, with the parameter names of transformers.
Legend: batch, rows = entries of one sequence in one forward, hidden, dim = head_dim, heads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.rotary import Rotary
from kernels.decoder_layer import feed_forward_of
from kernels.families import spec_of
from kernels.layers import rotated
from kernels.ops import REFERENCE
from kernels.specs import AttentionSpec, LayerSpec, Norms

Embed = Callable[[Tensor], Tensor]
"""The target's token embedding: ids [...] -> [..., hidden]."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of the layer of this index, over a forward's rows and earlier keys: query
[batch, heads, rows, dim], key and value [batch, kv_heads, rows, dim] -> like query. Scores are scaled by dim^-1/2."""

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, both [batch, kv_heads, rows, dim]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes and variants of a drafter's decoder layers."""

    hidden: int
    intermediate: int
    spec: LayerSpec  # of every layer
    epsilon: float
    rotary: Rotary
    experts: tuple[int, int, int]  # number of experts, and widths of one and of the shared one

    @staticmethod
    def of(target: Mapping[str, Any]) -> "LayerShape":
        """Return the shape for a transformers config. Layers of a drafter are alike, none has a window, and norms
        multiply by their weight, to which a family's offset has been added."""
        model = spec_of(target)
        first = next(layer for layer in model.layers if isinstance(layer.mixer, AttentionSpec))
        spec = replace(first, mixer=replace(first.attention, window=None), norm_offset=None)
        width = target.get("moe_intermediate_size") or 0
        experts = (
            target.get("n_routed_experts") or target.get("num_experts") or 0,
            width,
            target.get("shared_expert_intermediate_size") or width * (target.get("n_shared_experts") or 0),
        )
        rotary = Rotary(target, spec.attention.dim)
        sizes = target["hidden_size"], target.get("intermediate_size") or 0
        return LayerShape(*sizes, spec, model.epsilon, rotary, experts)

    @property
    def attention(self) -> AttentionSpec:
        """The attention of every layer."""
        return self.spec.attention


class Norm(nn.RMSNorm):
    """RMS norm in the dtype of its weight. A wider input is normed in parts of the weight's width, each separately."""

    def forward(self, x: Tensor) -> Tensor:
        """Norm each part of the last dimension. # x [..., parts * width] -> like x"""
        return super().forward(x.to(self.weight.dtype).unflatten(-1, (-1, len(self.weight)))).flatten(-2)


class SelfAttention(nn.Module):
    """Self-attention with rotary positions, norms of queries and keys if the family has them, and output times
    sigmoid(gate) if it is gated."""

    def __init__(self, shape: LayerShape, extra: int = 0) -> None:
        """`extra`: width of the further input that is concatenated before the state."""
        super().__init__()
        joined, output, _ = shape.spec.biases
        reads = extra + shape.hidden
        own = shape.attention
        wide, narrow = own.query_heads * own.dim, own.kv_heads * own.dim
        self._gated = own.gated
        self.q_proj = nn.Linear(reads, 2 * wide if self._gated else wide, bias=joined)
        self.k_proj = nn.Linear(reads, narrow, bias=joined)
        self.v_proj = nn.Linear(reads, narrow, bias=joined)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=output)
        dim, span = own.dim, own.norms
        self.q_norm = Norm(dim if span == "head" else wide, shape.epsilon) if span else nn.Identity()
        self.k_norm = Norm(dim if span == "head" else narrow, shape.epsilon) if span else nn.Identity()
        self._dim = dim

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Attend from each row. # x [batch, rows, extra + hidden] -> [batch, rows, hidden]"""
        query, gate = self.q_proj(x), None
        if self._gated:  # each head has its gate behind its query
            query, gate = (part.flatten(2) for part in query.unflatten(2, (-1, 2 * self._dim)).chunk(2, dim=-1))
        query = self._by_head(self.q_norm(query))
        mixed = attend(rotated(query, *rotary).transpose(1, 2), *self.keys_values(x, rotary))
        mixed = mixed.transpose(1, 2).flatten(2).to(x.dtype)
        output: Tensor = self.o_proj(mixed if gate is None else mixed * gate.sigmoid())
        return output

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """Compute the rows' keys and values. # x [batch, rows, extra + hidden] -> both [batch, kv_heads, rows, dim]"""
        key, value = self._by_head(self.k_norm(self.k_proj(x))), self._by_head(self.v_proj(x))
        return rotated(key, *rotary).transpose(1, 2), value.transpose(1, 2)

    def _by_head(self, joined: Tensor) -> Tensor:
        """# [batch, rows, heads * dim] -> [batch, rows, heads, dim]"""
        return joined.view(*joined.shape[:-1], -1, self._dim)


class FeedForward(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) * W_up x)."""

    def __init__(self, hidden: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward. # x [..., hidden] -> [..., hidden]"""
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class ExpertsFeedForward(nn.Module):
    """Experts chosen by a router, and a shared one if the family has it, by the reference ops of the kernels."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        hidden, (count, width, shared), spec = shape.hidden, shape.experts, shape.spec.feed_forward
        assert spec.router is not None, "the family has experts"
        self._spec = spec
        router = nn.Linear(hidden, count, bias=False)
        if spec.router.scores == "sigmoid":
            router.e_score_correction_bias = nn.Parameter(torch.zeros(count))
        self.add_module(spec.router_name, router)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden) * hidden**-0.5)
        self.experts.down_proj = nn.Parameter(torch.randn(count, hidden, width) * width**-0.5)
        if spec.shared is not None:
            self.add_module(spec.shared, FeedForward(hidden, shared, bias=False))
        if spec.shared_gated:
            self.add_module(f"{spec.shared}_gate", nn.Linear(hidden, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward; the choice of experts has no gradient. # x [..., hidden] -> [..., hidden]"""
        rows = x.flatten(0, -2)
        return feed_forward_of(dict(self.named_parameters("mlp")), REFERENCE, self._spec)(rows, rows).view_as(x)


class DrafterLayer(nn.Module):
    """A decoder layer of any family: the differentiable form of `kernels.decoder_layer`."""

    def __init__(self, shape: LayerShape, extra: int = 0, *, normed_residual: bool = False) -> None:
        """`normed_residual`: the attention output is added to the normed state."""
        super().__init__()
        self._normed_residual = normed_residual
        names = shape.spec.norms
        before, after = self._add_norm(shape, names.attention_input), self._add_norm(shape, names.attention_output)
        self.self_attn = SelfAttention(shape, extra)
        self.norms = Norms(
            before, after, self._add_norm(shape, names.mlp_input), self._add_norm(shape, names.mlp_output)
        )
        sparse, bias = shape.spec.feed_forward.router is not None, shape.spec.biases[2]
        self.mlp = ExpertsFeedForward(shape) if sparse else FeedForward(shape.hidden, shape.intermediate, bias=bias)

    def _add_norm(self, shape: LayerShape, name: str | None) -> nn.Module:
        """Add and return the norm of that name, or the identity if it is None."""
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
        """Run the layer. Attention reads [extra; normed state].
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
    """Decoder layers and the output norm. `extra` and `normed_residual` apply to the first layer (see
    `DrafterLayer`)."""

    def __init__(self, shape: LayerShape, num_layers: int, extra: int = 0, *, normed_residual: bool = False) -> None:
        super().__init__()
        self.shape = shape
        first = [DrafterLayer(shape, extra, normed_residual=normed_residual) for _ in range(min(1, num_layers))]
        self.layers = nn.ModuleList([*first, *(DrafterLayer(shape) for _ in range(1, num_layers))])
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)


class Input(nn.Module, ABC):
    """Base class of input layers, which compute the first layer's input of blocks from tapped features and tokens."""

    is_solved: ClassVar[bool] = True  # initial weights come from a regression, by `solve`; False: from `start`
    condition_proj: nn.Linear
    feature_norms: nn.ModuleList  # one per normed part of the features, or empty

    def condition(self, features: Tensor) -> Tensor:
        """Return the condition c, a projection of all taps, which are normed first if there are norms.
        # features [..., taps * hidden] -> [..., hidden]"""
        features = features.to(self.condition_proj.weight.dtype)
        if self.feature_norms:
            taps = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.feature_norms, taps, strict=True)], dim=-1)
        projected: Tensor = self.condition_proj(features)
        return projected

    @abstractmethod
    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return the first layer's input for some entries of each anchor's block. `context`: the anchor's condition, or
        for a further block the state at which it starts; `embedded`: embedding of the token after the anchor.
        # context, embedded [..., hidden] -> [..., entries, width]"""

    def solve(self, sums: Any, generator: torch.Generator) -> None:
        """Set all weights from the regression `sums` (`InputSums`); `generator` draws random ones."""
        raise AssertionError("this input is not solved")

    def start(self, embed: Embed) -> None:
        """Set the weights that are not trained, if `is_solved` is False."""
