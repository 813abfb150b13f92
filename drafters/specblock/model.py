"""The SpecBlock network: one forward turns anchors into blocks of K dependent positions.

An anchor t is a position whose target features are known together with the next token. Entry k of anchor t (k = 1..K)
stands at position t + k and predicts the token at t + k + 1:
    h0_k = W_fuse [norm(c_t); norm(e(x_{t+1})); norm(q_k)],    c_t = W_cond [h_low; h_mid; h_top]     (section 3.1)
    h_k <- W_shift [h_k; h_{k-1}],  h_0 := h_1,                between the decoder layers              (section 3.2)
This is the form that is trained; `network.py` serves the same weights. Who attends to whom is the caller's.
Legend: batch, rows = entries of one sequence in one forward, hidden, dim = head_dim, taps, draft_vocab."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from drafters.eagle3.model import TokenBeside
from drafters.medusa.model import EntryHeads, ResidualHeads
from drafters.ranks import class_logits
from drafters.specblock.condition import condition_of
from drafters.specblock.kind import TrainedKind
from drafters.trained_kinds import TRAINED_KINDS
from drafters.treeflash.model import PathHead
from kernels.rank_features import NUM_FEATURES, TOP

HEADS = ("lm_head.", "rank_head.", "rank_norm.")
"""What the names of parameters behind the decoder layers begin with."""

STANDARD = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers a drafter can have."""

FEATURE_SCALE = 0.2  # log-probabilities and entropies reach 10
RANK_EPSILON = torch.finfo(torch.float32).eps

Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> the target's embeddings of them [..., hidden]."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer, by its number, among a forward's rows and whatever stands before them: query [batch, heads,
rows, dim], key and value [batch, kv_heads, rows, dim] -> like query. Scores are scaled by dim^-1/2."""

KeysValues = tuple[Tensor, Tensor]
"""Of one layer, both [batch, kv_heads, rows, dim]."""

PrefixEntries = Literal["first", "all"]
RANK_CLASSES = 4
"""Where the target's token stands in the drafter's ranking: 1, 2-4, 5-10, beyond (SpecBlock appendix B)."""


_FIRST_FIELDS = frozenset(
    [
        "target",
        "tap_layers",
        "draft_vocab_size",
        "num_layers",
        "block_size",
        "rank_hidden",
        "prefix_entries",
        "normalise_features",
        "normalise_rank_inputs",
        "shift",
        "broadcast",
        "coupled",
        "trained_length",
    ]
)
"""Of a drafter's config, always written; later ones where they are not the usual."""


def layers_for(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config by which a target's drafter has its layers: its own, or where these are no standard ones Llama's in
    its sizes. # transformers' config of the target's decoder"""
    if target["model_type"] in STANDARD:
        return target
    text = AutoConfig.for_model(**copy.deepcopy(dict(target)))
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    others = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    known = {name: getattr(text, name) for name in (*sizes, *others) if getattr(text, name, None) is not None}
    return LlamaConfig(**known).to_dict()


@dataclass(frozen=True, slots=True)
class SpecBlockConfig:
    """Shapes and switches, written beside the weights. Raises ValueError for values that cannot work."""

    target: Mapping[str, Any]  # of `layers_for`
    tap_layers: tuple[int, ...]  # target layers whose outputs make the condition
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int = 2  # 0: residual heads alone, one for each entry of a block
    block_size: int = 4  # K, positions per forward
    rank_hidden: int = 256
    # "all", as in the paper, costs K times the rows for no gain that was measured (docs/training.md).
    prefix_entries: PrefixEntries = "first"  # which of a committed position's K entries later ones attend to
    normalise_features: bool = True  # each tapped feature before the projection (EAGLE-3.1; not in published files)
    normalise_rank_inputs: bool = True  # states and features of the rank head, which learns nothing from raw ones
    shift: bool = True  # False: ablation without the layer-wise shift
    broadcast: bool = True  # False: ablation, only a block's first position sees the condition
    coupled: bool = True  # rank head trained on scores with the sampling noise
    trained_length: int = 512  # longest context seen in training, tokens
    kind: str = "specblock"  # of `TRAINED_KINDS`
    ranks_from_draft: bool = False  # the rank head corrects what the draft itself says of ranks
    token_beside: bool = False  # the first layer reads the token beside the state, and blocks go on before the norm
    own_heads: bool = False  # an output layer for each entry of a block, and no norm before it

    def __post_init__(self) -> None:
        if self.kind not in TRAINED_KINDS:
            raise ValueError(f"drafter config: kind {self.kind!r} is none of {', '.join(TRAINED_KINDS)}")
        for name in ("draft_vocab_size", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        if self.num_layers < 0 or (self.num_layers > 0) is not (TRAINED_KINDS[self.kind].shape["num_layers"] > 0):
            raise ValueError(f"drafter config: num_layers must not be {self.num_layers} in one of kind {self.kind}")
        if self.token_beside and (self.num_layers, self.block_size, self.shift) != (1, 1, False):
            raise ValueError("drafter config: token_beside asks for one layer and one position per forward")
        if self.own_heads and self.num_layers:
            raise ValueError("drafter config: own_heads asks for residual heads: num_layers 0")
        if self.prefix_entries not in ("first", "all"):
            raise ValueError("drafter config: prefix_entries must be 'first' or 'all'")
        if self.prefix_entries == "all" and not self.runs_context:
            raise ValueError(f"drafter config: prefix_entries must be 'first' in one of kind {self.kind}")
        kind = self.target.get("model_type")
        if kind not in STANDARD:
            raise ValueError(
                f"drafter config: layers of kind {kind!r} are none that a drafter can have ({', '.join(STANDARD)}); "
                "train one for this target with `adaptree train drafter`"
            )
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

    @property
    def hidden_size(self) -> int:
        return int(self.target["hidden_size"])

    @property
    def target_vocab_size(self) -> int:
        return int(self.target["vocab_size"])

    @property
    def beside(self) -> int:
        """How much the first layer reads beside the state."""
        return self.hidden_size if self.token_beside else 0

    @property
    def entries(self) -> int:
        """Entries of a committed position that later positions attend to."""
        return self.block_size if self.prefix_entries == "all" else 1

    @property
    def traits(self) -> TrainedKind:
        """What sets its kind apart."""
        return TRAINED_KINDS[self.kind]

    @property
    def trained_blocks(self) -> int:
        """Blocks in a row that it is trained through."""
        return self.traits.trained_blocks

    @property
    def reach(self) -> int:
        """Entries of those, one behind the other."""
        return self.trained_blocks * self.block_size

    @property
    def runs_context(self) -> bool:
        """Whether entries of committed positions are run, each of which then says something."""
        return self.traits.context == "run"

    @property
    def forward_size(self) -> int:
        """Positions that one forward of the layers speaks of."""
        return self.reach if self.traits.conditioned else self.block_size

    @property
    def held(self) -> int:
        """Entries of an anchor's block that stay as those of a committed position."""
        return self.entries if self.runs_context else 0

    def live(self, blocks: int, starts: int) -> int:
        """Entries of one tree that do not stay."""
        further = 0 if self.traits.conditioned else (blocks - 1) * starts * self.block_size
        return self.forward_size - self.held + further

    def described(self) -> dict[str, Any]:
        """As plain values; a SpecBlock's as they were before there were other kinds, for digests are taken of them."""
        values = asdict(self)
        usual = {field.name: field.default for field in fields(self) if field.name not in _FIRST_FIELDS}
        return {name: value for name, value in values.items() if name not in usual or value != usual[name]}

    def to_json(self) -> str:
        return json.dumps(self.described(), indent=2, sort_keys=True)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "SpecBlockConfig":
        """Raises TypeError for unknown keys."""
        return SpecBlockConfig(**{**values, "tap_layers": tuple(values["tap_layers"])})


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a drafter's layers are like."""

    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    biases: tuple[bool, bool, bool]  # of queries, keys and values; of what attention puts out; of the feed-forward
    head_norms: bool
    rotary: "Rotary"

    @staticmethod
    def of(config: SpecBlockConfig) -> "LayerShape":
        text = AutoConfig.for_model(**copy.deepcopy(dict(config.target)))
        kind, heads = text.model_type, text.num_attention_heads
        biased = bool(getattr(text, "attention_bias", False))
        return LayerShape(
            text.hidden_size,
            text.intermediate_size,
            heads,
            text.num_key_value_heads or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads,
            float(text.rms_norm_eps),
            (biased or kind == "qwen2", biased, bool(getattr(text, "mlp_bias", False))),
            kind == "qwen3",
            Rotary(text),
        )


class Rotary:
    """Rotary embedding of positions with the target's scaling. No part of any module: a module's frequencies would be
    rounded with its weights."""

    def __init__(self, text: PreTrainedConfig) -> None:
        known = LlamaRotaryEmbedding(text)  # type: ignore[arg-type]  # any family's config has what it asks for
        self._scale = float(known.attention_scaling)
        self._frequencies = torch.cat([known.inv_freq, known.inv_freq]).float()  # [dim]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """# positions [...] int64 -> cosines and sines, both [..., dim]"""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None] * self._frequencies
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The entries of one forward."""

    inputs: Tensor  # [batch, rows, hidden], h0 of each entry
    positions: Tensor  # [batch, rows] int64
    previous: Tensor  # [batch, rows] int64, the row of the entry before it in its block; a first entry names itself


class InputLayer(nn.Module):
    """Fuses the condition, the token and the position query of each entry."""

    def __init__(self, config: SpecBlockConfig, norm_epsilon: float) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.condition_proj = nn.Linear(len(config.tap_layers) * hidden, hidden, bias=False)
        self.condition_norm = nn.RMSNorm(hidden, eps=norm_epsilon)
        self.token_norm = nn.RMSNorm(hidden, eps=norm_epsilon)
        self.position_queries = nn.Parameter(torch.randn(config.forward_size, hidden) * 0.02)
        self.query_norm = nn.RMSNorm(hidden, eps=norm_epsilon)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        taps = len(config.tap_layers) if config.normalise_features else 0
        self.feature_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=norm_epsilon) for _ in range(taps))
        self._broadcast = config.broadcast

    def condition(self, features: Tensor) -> Tensor:
        """c of tapped target features. # [..., taps * hidden] -> [..., hidden]"""
        return condition_of(features, self.feature_norms, self.condition_proj)

    def token(self, embedded: Tensor) -> Tensor:
        """What a token adds to h0 of an entry that sees it. # [..., hidden] -> same"""
        hidden = embedded.shape[-1]
        normed = self.token_norm(embedded.to(self.token_norm.weight.dtype))
        return linear(normed, self.fuse.weight[:, hidden : 2 * hidden])

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """h0 of some entries of each anchor. # context, embedded [..., hidden] -> [..., entries, hidden]"""
        queries = self.query_norm(self.position_queries[entries])  # [entries, hidden]
        dtype = self.token_norm.weight.dtype  # not autocast's: a norm of mixed dtypes is slow
        known = torch.cat([self.condition_norm(context.to(dtype)), self.token_norm(embedded.to(dtype))], dim=-1)
        seen = known[..., None, :].expand(*known.shape[:-1], queries.shape[0], -1)
        if not self._broadcast:
            is_first = torch.arange(self.position_queries.shape[0], device=known.device)[entries] == 0
            seen = seen * is_first[:, None]
        asked = queries.expand(*seen.shape[:-1], -1)
        fused: Tensor = self.fuse(torch.cat([seen, asked], dim=-1))
        return fused


class SelfAttention(nn.Module):
    """Queries, keys and values with rotary positions, normed by head where the family does."""

    def __init__(self, shape: LayerShape, beside: int = 0) -> None:
        """`beside`: how much it reads before the state."""
        super().__init__()
        joined, output, _ = shape.biases
        reads = beside + shape.hidden
        wide, narrow = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(reads, wide, bias=joined)
        self.k_proj = nn.Linear(reads, narrow, bias=joined)
        self.v_proj = nn.Linear(reads, narrow, bias=joined)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=output)
        if shape.head_norms:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)
        self._shape = shape

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """# [batch, rows, beside + hidden] -> [batch, rows, hidden]"""
        query = self._by_head(self.q_proj(x))
        if self._shape.head_norms:
            query = self.q_norm(query.to(x.dtype))
        mixed = attend(_rotated(query, *rotary).transpose(1, 2), *self.keys_values(x, rotary))
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2).to(x.dtype))
        return output

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> KeysValues:
        """# [batch, rows, hidden] -> both [batch, kv_heads, rows, dim]"""
        key, value = self._by_head(self.k_proj(x)), self._by_head(self.v_proj(x))
        if self._shape.head_norms:
            key = self.k_norm(key.to(x.dtype))
        return _rotated(key, *rotary).transpose(1, 2), value.transpose(1, 2)

    def _by_head(self, joined: Tensor) -> Tensor:
        """# [batch, rows, heads * dim] -> [batch, rows, heads, dim]"""
        return joined.view(*joined.shape[:-1], -1, self._shape.head_dim)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        bias = shape.biases[2]
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """# [..., hidden] -> same"""
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    """A standard decoder layer, the differentiable form of `kernels.decoder_layer`; transformers' names."""

    def __init__(self, shape: LayerShape, beside: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.self_attn = SelfAttention(shape, beside)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(
        self,
        hidden: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        beside: Tensor | None = None,
    ) -> Tensor:
        """# hidden [batch, rows, hidden], beside [batch, rows, beside] -> like hidden"""
        normed = self.input_layernorm(hidden)
        read = normed if beside is None else torch.cat([beside, normed], dim=-1)
        hidden = hidden + self.self_attn(read, rotary, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Decoder(nn.Module):
    """Layers and the norm behind them, if there is one; `beside` is what the first one reads beside the state."""

    def __init__(self, shape: LayerShape, num_layers: int, beside: int = 0, *, normed: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape, 0 if number else beside) for number in range(num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon) if normed else nn.Identity()


Input = InputLayer | ResidualHeads | TokenBeside
"""What makes the first inputs of blocks."""


def _input_of(config: SpecBlockConfig, shape: LayerShape) -> Input:
    hidden, taps, epsilon, normalise = (
        config.hidden_size,
        len(config.tap_layers),
        shape.epsilon,
        config.normalise_features,
    )
    if config.token_beside:
        return TokenBeside(hidden=hidden, taps=taps, epsilon=epsilon, normalise=normalise)
    if config.num_layers:
        return InputLayer(config, epsilon)
    return ResidualHeads(hidden=hidden, taps=taps, heads=config.block_size, epsilon=epsilon, normalise=normalise)


def _head_of(config: SpecBlockConfig) -> nn.Linear | EntryHeads:
    if config.own_heads:
        return EntryHeads(config.block_size, config.hidden_size, config.draft_vocab_size)
    return nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves against halves. # x [batch, rows, heads, dim], cos and sin [batch, rows, dim]"""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]


class SpecBlock(nn.Module):
    """Condition, fusion, decoder layers with shifts between, head and rank head. The token
    embedding is the target's own and is not kept."""

    t2d: Tensor  # [target_vocab] int64, draft id of a target token, -1 for tokens the drafter cannot propose
    d2t: Tensor  # [draft_vocab] int64, target id of a draft token

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        self.config = config
        shape, hidden = LayerShape.of(config), config.hidden_size
        self.input_layer = _input_of(config, shape)
        self.decoder = Decoder(shape, config.num_layers, config.beside, normed=not config.own_heads)
        self.shift_proj = nn.ModuleList(
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(config.num_layers - 1 if config.shift else 0)
        )
        self.lm_head = _head_of(config)
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + NUM_FEATURES, config.rank_hidden), nn.SiLU(), nn.Linear(config.rank_hidden, RANK_CLASSES)
        )
        self.rank_norm = nn.RMSNorm(hidden, eps=RANK_EPSILON) if config.normalise_rank_inputs else None
        self.path_head = PathHead(hidden, shape.epsilon) if config.traits.conditioned else None
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)
        self.register_buffer("t2d", torch.full((config.target_vocab_size,), -1), persistent=False)

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Name the tokens that can be drafted. # d2t [draft_vocab] int64, target ids"""
        self.d2t.copy_(d2t)
        self.t2d.fill_(-1)
        self.t2d[d2t] = torch.arange(d2t.shape[0], device=self.t2d.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def forward(self, rows: BlockRows, attend: Attend) -> Tensor:
        """States after the output norm: what the heads read, and the context of blocks that start at an entry; with the
        token beside the state that context stands behind it. # -> [batch, rows, hidden + beside]"""
        inputs, width = (
            rows.inputs.to(self.dtype),
            self.config.hidden_size,
        )  # under autocast too: rounding is for products
        hidden, beside = inputs[..., :width], inputs[..., width:]
        rotary = self.decoder.shape.rotary(rows.positions, self.dtype)
        for number, layer in enumerate(self.decoder.layers):
            if number and self.config.shift:
                before = torch.take_along_dim(hidden, rows.previous[:, :, None], dim=1)
                hidden = self.shift_proj[number - 1](torch.cat([hidden, before], dim=-1)).to(self.dtype)
            hidden = layer(hidden, rotary, partial(attend, number), None if number else beside)
        states: Tensor = self.decoder.norm(hidden)
        return torch.cat([states, hidden], dim=-1) if self.config.token_beside else states

    def parted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the heads read of states, and the context of blocks that start there: mostly the same.
        # [..., hidden + beside] -> both [..., hidden]"""
        return states[..., : self.config.hidden_size], states[..., -self.config.hidden_size :]

    def injected(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """What each layer holds of committed positions that are not run, made of their condition.
        # context [batch, rows, hidden], positions [batch, rows] int64"""
        context, rotary = context.to(self.dtype), self.decoder.shape.rotary(positions, self.dtype)
        layers = (layer for layer in self.decoder.layers if isinstance(layer, Layer))
        return [layer.self_attn.keys_values(layer.input_layernorm(context), rotary) for layer in layers]

    def rank_logits(self, states: Tensor, features: Tensor) -> Tensor:
        """Scores of the rank classes (section 3.2). # states [..., hidden], features [..., 15] -> [..., 4] float32"""
        known, states, features = features, states.to(self.dtype), features.to(self.dtype)
        if self.rank_norm is not None:
            states, features = self.rank_norm(states), features * FEATURE_SCALE
        logits: Tensor = self.rank_head(torch.cat([states, features], dim=-1)).float()
        return logits + class_logits(known[..., :TOP].float()) if self.config.ranks_from_draft else logits
