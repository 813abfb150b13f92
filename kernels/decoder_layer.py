"""A decoder layer as a short sequence of ops over flat rows: products, attention, gate, rotary embedding, and norms
where its model family has them. `kernels.families` describes the layers of a family.

Legend: rows = tokens of one forward, hidden = the model's width, dim = head_dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kernels.experts import QuantisedStack, Router, StackedWeight
from kernels.feed_forward import DenseFeedForward, FeedForwardOp, ParallelFeedForward, SparseFeedForward
from kernels.layers import GateForm, Heads, Product, RotaryRows, Weight, dense, join, rows_of
from kernels.mixers import AttentionMixer, RecurrentMixer
from kernels.ops import Ops
from kernels.recurrence import Convolution, Recurrence, StateRows
from kernels.specs import AttentionSpec, FeedForwardSpec, LayerSpec, Norms, RecurrentSpec
from kernels.tree_attention import MAX_DEPTH, AttentionForm, KVRows


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rotary embeddings of a forward's rows, and their keys and values by KV group, shared by all layers."""

    rotary: Mapping[str, RotaryRows]  # by the names of `AttentionSpec.rope`
    groups: tuple[KVRows, ...]  # one for all layers, or one for layers without a window and one for those with one
    per_layer: Tensor | None = None  # [layers, rows, width], the rows' embeddings for each layer
    states: StateRows | None = None  # of recurrent layers
    beside: Tensor | None = None  # [rows, width], what a drafter's first layer reads beside the hidden states

    def of(self, window: int | None) -> KVRows:
        """Return the group of layers with this window."""
        return self.groups[0 if window is None else -1]


class RotaryTable:
    """Lookup table of the rotary embedding of all positions."""

    def __init__(
        self,
        embed: Callable[[Tensor], tuple[Tensor, Tensor]],
        max_positions: int,
        device: torch.device,
        query_scale: Callable[[Tensor], Tensor] | None = None,
    ):
        """`embed` computes cos and sin of positions: [positions] int64 -> two tensors [positions, rotated];
        `query_scale` a factor on queries, [positions] -> [positions]."""
        # Tree nodes have positions beyond the longest sequence.
        positions = torch.arange(max_positions + MAX_DEPTH, device=device)
        self.table = torch.stack(embed(positions))  # [2, positions, rotated]
        self.query_scale = None if query_scale is None else query_scale(positions).to(self.table.dtype)

    def __call__(self, positions: Tensor) -> RotaryRows:
        """Look up positions. # positions [rows] int64 -> of as many rows"""
        cos, sin = self.table.index_select(1, positions)
        return RotaryRows(cos, sin, None if self.query_scale is None else self.query_scale[positions])


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """What the embeddings of tokens for a layer add to its hidden states: norm(projection(gelu(gate(h)) * e))."""

    ops: Ops
    index: int  # of the layer
    gate: Product
    projection: Product
    norm: Callable[[Tensor], Tensor]

    def __call__(self, hidden: Tensor, places: RowPlaces) -> Tensor:
        """# hidden [rows, hidden] -> like it"""
        assert places.per_layer is not None, "the model embeds tokens for each layer"
        joined = torch.cat((self.gate(hidden), places.per_layer[self.index]), dim=-1)
        return self.norm(self.projection(self.ops.gate_mul(joined, GateForm("gelu_tanh"))))


class _Weights:
    """The weights of a layer by name, of which each must be taken once."""

    def __init__(self, weights: Mapping[str, StackedWeight | Weight], ops: Ops) -> None:
        self._ops, self.left = ops, dict(weights)

    def product(self, *places: str, fused: str = "") -> Product:
        """Plan the product with the joined weights of these modules, or of the one that has all of them. Raises
        ValueError if some are missing."""
        return self._ops.plan_linear(*self._joined((fused,) if f"{fused}.weight" in self.left else places))

    def row_product(self, place: str, unit: int = 1) -> Product:
        """Plan the product with a weight whose columns several devices may share; `unit` of them stay on one."""
        return self._ops.plan_row_product(*self._joined([place]), unit)

    def _joined(self, places: Sequence[str]) -> tuple[Weight, Tensor | None]:
        found = [self._matrix(f"{place}.weight") for place in places if f"{place}.weight" in self.left]
        biases = [self.vector(f"{place}.bias") for place in places if f"{place}.bias" in self.left]
        if len(found) < len(places) or len(biases) not in (0, len(places)):
            raise ValueError(f"weights of {', '.join(places)} are missing, or some of their biases")
        return join(found), torch.cat(biases) if biases else None

    def mixer(self, spec: LayerSpec, epsilon: float) -> AttentionMixer | RecurrentMixer:
        """Plan the attention or the recurrence."""
        if isinstance(spec.mixer, RecurrentSpec):
            return self._recurrent(spec.mixer, epsilon)
        own, heads = spec.mixer, self.heads(spec.mixer, epsilon, spec.norm_offset)
        sinks = self.vector("self_attn.sinks").float() if own.sinks else None
        if own.gated:
            self._part_gates(own)
        names = [*heads.projected, "gate"] if own.gated else heads.projected
        return AttentionMixer(
            self._ops,
            own.rope,
            AttentionForm(own.scale, own.window, own.softcap, sinks),
            heads,
            self.product(*(f"self_attn.{name}_proj" for name in names), fused="self_attn.qkv_proj"),
            self.row_product("self_attn.o_proj", unit=own.dim),
            own.gated,
            slice(None) if own.own is None else slice(*(head * own.dim for head in own.own)),
        )

    def _part_gates(self, spec: AttentionSpec) -> None:
        """Part the projection of queries, in which each head has its gate behind its query."""
        by_head = torch.arange(2 * spec.query_heads * spec.dim).view(spec.query_heads, 2, -1)
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in self.left:
                whole = self.left.pop(f"self_attn.q_proj.{kind}")
                assert not isinstance(whole, QuantisedStack), "only experts are stacked"
                for part, name in enumerate(("q", "gate")):
                    self.left[f"self_attn.{name}_proj.{kind}"] = rows_of(whole, by_head[:, part].flatten())

    def _recurrent(self, spec: RecurrentSpec, epsilon: float) -> RecurrentMixer:
        def name(part: str) -> str:
            return f"{spec.module}.{part}"

        taps = self.vector(name("conv1d.weight")).flatten(1)  # [columns, kernel]
        convolution = Convolution(taps, self.optional(name("conv1d.bias")), activated=bool(spec.heads))
        if taps.shape != (spec.columns, spec.kernel):
            raise ValueError(f"the convolution has the shape {list(taps.shape)}")
        if not spec.heads:
            projection, norm, recurrence, first, group = self.product(name("in_proj")), None, None, 0, 0
        else:
            projection, norm = self._recurrent_projection(spec), self.vector(name("norm.weight"))
            first = 0 if spec.corrects else spec.heads * spec.value_dim  # where the gate ends
            group = spec.value_dim if spec.corrects else first // spec.key_heads
            recurrence = Recurrence(
                *(spec.key_heads, spec.heads, spec.key_dim, spec.value_dim),
                decay=-self.vector(name("A_log")).float().exp(),
                time_bias=self.vector(name("dt_bias")).float(),
                corrects=spec.corrects,
                skip=None if spec.corrects else self.vector(name("D")).float(),
                time_limits=spec.time_limits,
            )
        output = self.product(name("out_proj"))
        return RecurrentMixer(self._ops, projection, first, convolution, recurrence, norm, group, epsilon, output)

    def _recurrent_projection(self, spec: RecurrentSpec) -> Product:
        """Plan the product of columns that the state reads and of the gate: [q | k | v | a | b | gate] for the delta
        rule, where Qwen3-Next has them by key heads; [gate | x | B | C | dt] for Mamba-2."""
        parts = [f"{spec.module}.in_proj{part}" for part in ("_qkv", "_a", "_b", "_z")]
        if not spec.corrects:
            return self.product(f"{spec.module}.in_proj")
        if f"{parts[0]}z.weight" not in self.left:
            return self.product(*parts)
        shared = spec.heads // spec.key_heads
        wide, keys = shared * spec.value_dim, spec.key_dim
        weight, bias = self._joined([f"{parts[0]}z", f"{spec.module}.in_proj_ba"])
        places = torch.arange(weight.shape[0])
        q, k, v, z = places[: -2 * spec.heads].view(spec.key_heads, -1).split((keys, keys, wide, wide), dim=1)
        b, a = places[-2 * spec.heads :].view(spec.key_heads, -1).split(shared, dim=1)
        return self._ops.plan_linear(rows_of(weight, torch.cat([part.flatten() for part in (q, k, v, a, b, z)])), bias)

    def heads(self, spec: AttentionSpec, epsilon: float, norm_offset: float | None) -> Heads:
        """Describe the heads of the fused projection."""
        norms = None
        if spec.norms is not None:
            norm = self.vector("self_attn.q_norm.weight")
            norms = norm, norm if spec.source is not None else self.vector("self_attn.k_norm.weight")
        projected: Literal["qkv", "qk", "q"] = "qk" if spec.keys_are_values else "qkv"
        if spec.source is not None:
            projected = "q"
        return Heads(spec.query_heads, norms, epsilon, norm_offset, spec.value_norm, projected)

    def per_layer(self, index: int, norm: Callable[[Tensor, Tensor], Tensor]) -> PerLayerInput:
        """Plan what the embeddings of tokens for this layer add."""
        weight = self.vector("post_per_layer_input_norm.weight")
        gate, projection = self.product("per_layer_input_gate"), self.product("per_layer_projection")
        return PerLayerInput(self._ops, index, gate, projection, lambda x: norm(x, weight))

    def _matrix(self, name: str) -> Weight:
        value = self.left.pop(name)
        assert not isinstance(value, QuantisedStack), "only experts are stacked"
        return value

    def vector(self, name: str) -> Tensor:
        """Take a weight that is not quantised."""
        value = self.left.pop(name)
        assert isinstance(value, Tensor), "only matrices are quantised"
        return value

    def optional(self, name: str) -> Tensor | None:
        """Take a weight if it is there."""
        return self.vector(name) if name in self.left else None

    def _numbers(self, name: str) -> Tensor | None:
        """Take a weight if it is there, in float32."""
        value = self.optional(name)
        return None if value is None else value.float()

    def feed_forward(self, spec: FeedForwardSpec, norm: Callable[[Tensor, Tensor], Tensor]) -> FeedForwardOp:
        """Plan the feed-forward; `norm`: x, weight -> normed."""
        if spec.router is None:
            return self._dense("mlp", spec.gate)
        if not spec.beside:
            return self._sparse(spec, spec.router, f"mlp.{spec.router_name}", "mlp.experts")
        scale = self.vector("router.scale")
        return ParallelFeedForward(
            self._dense("mlp", spec.gate),
            self._sparse(spec, spec.router, "router.proj", "experts"),
            norm,
            router_norm=scale.float().mul(scale.shape[0] ** -0.5).to(scale.dtype),
            input_norm=self.vector("pre_feedforward_layernorm_2.weight"),
            output_norms=(
                self.vector("post_feedforward_layernorm_1.weight"),
                self.vector("post_feedforward_layernorm_2.weight"),
            ),
        )

    def _sparse(self, spec: FeedForwardSpec, how: Router, router: str, experts: str) -> SparseFeedForward:
        """Plan experts; `router`, `experts`: names of modules."""
        weight, bias = self._matrix(f"{router}.weight"), self.optional(f"{router}.bias")
        if how.scores == "sigmoid":
            weight = dense(weight).float()
        return SparseFeedForward(
            self._ops,
            how,
            logits=self._ops.plan_linear(weight, bias),
            correction=self._numbers(f"{router}.e_score_correction_bias"),
            expert_scale=self._numbers("router.per_expert_scale"),
            experts=self._ops.plan_experts(
                self._stack(f"{experts}.gate_up_proj"),
                self._stack(f"{experts}.down_proj"),
                self.optional(f"{experts}.gate_up_proj_bias"),
                self.optional(f"{experts}.down_proj_bias"),
                spec.gate,
            ),
            shared=None if spec.shared is None else self._dense(f"mlp.{spec.shared}", spec.gate),
            shared_gate=self.product(f"mlp.{spec.shared}_gate") if spec.shared_gated else None,
        )

    def _dense(self, part: str, gate: GateForm) -> DenseFeedForward:
        gate_up = self.product(f"{part}.gate_proj", f"{part}.up_proj", fused=f"{part}.gate_up_proj")
        return DenseFeedForward(self._ops, gate_up, self.row_product(f"{part}.down_proj"), gate)

    def _stack(self, name: str) -> StackedWeight:
        """Take the weights of all experts. # -> [experts, out, in]"""
        weight = self.left.pop(name)
        assert isinstance(weight, Tensor | QuantisedStack), "the matrices of experts are stacked"
        return weight


def feed_forward_of(weights: Mapping[str, Tensor], ops: Ops, spec: FeedForwardSpec) -> FeedForwardOp:
    """Build a feed-forward alone, of one part, from weights named as in a layer. # weights [...] each"""
    assert not spec.beside, "each part would have norms"
    return _Weights(weights, ops).feed_forward(spec, lambda x, weight: x)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer: its planned weights, and the ops of their device that run it."""

    ops: Ops
    mixer: AttentionMixer | RecurrentMixer
    norms: Norms[Tensor | None]  # [hidden] each
    epsilon: float
    norm_offset: float | None
    residual: float  # factor on what is added to the hidden states
    feed_forward: FeedForwardOp
    per_layer: PerLayerInput | None
    scalar: Tensor | None  # [1], factor on the layer's output

    @staticmethod
    def of(
        weights: Mapping[str, StackedWeight | Weight], ops: Ops, spec: LayerSpec, *, epsilon: float
    ) -> "DecoderLayer":
        """Build a layer from weights named as in transformers, those of experts as `plan_experts` takes them. Raises
        ValueError if weights are missing, or if there are others that the record does not say."""
        found = _Weights({spec.usual(name): weight for name, weight in weights.items()}, ops)

        def norm(x: Tensor, weight: Tensor) -> Tensor:
            return ops.add_rms_norm(x.contiguous(), None, weight, epsilon, spec.norm_offset)

        try:
            layer = DecoderLayer(
                ops,
                found.mixer(spec, epsilon),
                norms=Norms(*(None if name is None else found.vector(f"{name}.weight") for name in spec.norms)),
                epsilon=epsilon,
                norm_offset=spec.norm_offset,
                residual=spec.residual,
                feed_forward=found.feed_forward(spec.feed_forward, norm),
                per_layer=None if spec.per_layer is None else found.per_layer(spec.per_layer, norm),
                scalar=found.vector("layer_scalar") if spec.scaled else None,
            )
        except KeyError as error:
            raise ValueError(f"weight {error.args[0]} is missing") from error
        if found.left:
            raise ValueError(f"layers of this family have no such weights: {', '.join(sorted(found.left))}")
        return layer

    @property
    def attention(self) -> AttentionMixer:
        """The layer's attention; the layer must not be recurrent."""
        assert isinstance(self.mixer, AttentionMixer), "a recurrent layer does not attend"
        return self.mixer

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Any) -> Tensor:
        """Run the layer on hidden + delta. Adds `delta` and the attention output to `hidden` in place, and returns the
        feed-forward output, which the next layer adds as its `delta`. `pool`: keys and values, or states.
        # hidden, delta [rows, hidden]; pool [2, slots, kv_heads, dim] -> like delta"""
        x = self.add_norm(hidden, delta, self.norms.attention_input)
        delta = self._finish(self.mixer(x, places, pool), hidden)
        if self.per_layer is not None:
            hidden += delta
            delta = self.per_layer(hidden, places)
        if self.scalar is not None:
            hidden *= self.scalar
            delta = delta * self.scalar
        return delta

    def rest(self, query: Tensor, hidden: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the second part of the layer, after `store`: adds the attention output to `hidden` in place, and returns
        the feed-forward output. # query [rows, query heads, dim] -> like hidden"""
        return self._finish(self.attention.attended(query, places, pool), hidden)

    def _finish(self, mixed: Tensor, hidden: Tensor) -> Tensor:
        """# mixed, hidden [rows, hidden] -> like hidden"""
        delta = self._scaled(self.add_norm(mixed, None, self.norms.attention_output))
        x = self.add_norm(hidden, delta, self.norms.mlp_input)
        return self._scaled(self.add_norm(self.feed_forward(x, hidden), None, self.norms.mlp_output))

    def store(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the first part of the layer: norm hidden + delta, project it, and store keys and values in the pool.
        # hidden, delta [rows, hidden] -> queries [rows, query heads, dim]"""
        return self.attention.keep(self.add_norm(hidden, delta, self.norms.attention_input), places, pool)

    def add_norm(self, hidden: Tensor, delta: Tensor | None, norm: Tensor | None) -> Tensor:
        """Add `delta` to `hidden` in place, and return the norm of the sum, or `hidden` itself if `norm` is None.
        # hidden, delta [rows, hidden], norm [hidden] -> like hidden"""
        if norm is not None:
            return self.ops.add_rms_norm(hidden, delta, norm, self.epsilon, self.norm_offset)
        return hidden if delta is None else hidden.add_(delta)

    def _scaled(self, delta: Tensor) -> Tensor:
        return delta if self.residual == 1 else delta.mul_(self.residual)
