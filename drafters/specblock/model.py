"""The SpecBlock network: one forward turns anchors into blocks of K dependent positions.

An anchor t is a position whose target features are known together with the next token. Entry k of anchor t (k = 1..K)
stands at position t + k and predicts the token at t + k + 1:
    h0_k = W_fuse [norm(c_t); norm(e(x_{t+1})); norm(q_k)],    c_t = W_cond [h_low; h_mid; h_top]     (section 3.1)
    h_k <- W_shift [h_k; h_{k-1}],  h_0 := h_1,                between the decoder layers              (section 3.2)
Who attends to whom is the caller's: training and serving bring their own attention.
Legend: batch, rows = entries of one sequence in one forward, hidden, taps, draft_vocab."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from kernels.rank_features import NUM_FEATURES

ATTENTION_NAME = "adaptree_draft"
HEADS = ("lm_head.", "rank_head.", "rank_norm.")
"""What the names of parameters behind the decoder layers begin with."""

_FEATURE_SCALE = 0.2  # log-probabilities and entropies reach 10


Embed = Callable[[Tensor], Tensor]
"""Token ids [...] -> the target's embeddings of them [..., hidden]."""


PrefixEntries = Literal["first", "all"]
RANK_CLASSES = 4
"""Where the target's token stands in the drafter's ranking: 1, 2-4, 5-10, beyond (SpecBlock appendix B)."""


@dataclass(frozen=True, slots=True)
class SpecBlockConfig:
    """Shapes and switches, written beside the weights. Raises ValueError for values that cannot work."""

    target: Mapping[str, Any]  # transformers' config of the target's decoder: the drafter's layers are of its kind
    tap_layers: tuple[int, ...]  # target layers whose outputs make the condition
    draft_vocab_size: int  # tokens the drafter can propose
    num_layers: int = 2
    block_size: int = 4  # K, positions per forward
    rank_hidden: int = 256
    prefix_entries: PrefixEntries = "first"  # which of a committed position's K entries later ones attend to
    normalise_features: bool = True  # each tapped feature before the projection (EAGLE-3.1; not in published files)
    normalise_rank_inputs: bool = True  # states and features of the rank head, which learns nothing from raw ones
    shift: bool = True  # False: ablation without the layer-wise shift
    broadcast: bool = True  # False: ablation, only a block's first position sees the condition
    coupled: bool = True  # rank head trained on scores with the sampling noise
    trained_length: int = 512  # longest context seen in training, tokens

    def __post_init__(self) -> None:
        for name in ("draft_vocab_size", "num_layers", "block_size", "rank_hidden", "trained_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafter config: {name} must be at least 1")
        if self.prefix_entries not in ("first", "all"):
            raise ValueError("drafter config: prefix_entries must be 'first' or 'all'")
        if not self.tap_layers:
            raise ValueError("drafter config: tap_layers must name at least one target layer")

    @property
    def hidden_size(self) -> int:
        return int(self.target["hidden_size"])

    @property
    def target_vocab_size(self) -> int:
        return int(self.target["vocab_size"])

    @property
    def entries(self) -> int:
        """Entries of a committed position that later positions attend to."""
        return self.block_size if self.prefix_entries == "all" else 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> "SpecBlockConfig":
        """Raises TypeError for unknown keys."""
        return SpecBlockConfig(**{**values, "tap_layers": tuple(values["tap_layers"])})


class RowAttention(Protocol):
    """Attention among a forward's rows and whatever stands before them."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [batch, heads, rows, head_dim], key and value [batch, kv_heads, rows, head_dim] -> like query."""


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
        self.position_queries = nn.Parameter(torch.randn(config.block_size, hidden) * 0.02)
        self.query_norm = nn.RMSNorm(hidden, eps=norm_epsilon)
        self.fuse = nn.Linear(3 * hidden, hidden, bias=False)
        taps = len(config.tap_layers) if config.normalise_features else 0
        self.feature_norms = nn.ModuleList(nn.RMSNorm(hidden, eps=norm_epsilon) for _ in range(taps))
        self._broadcast = config.broadcast

    def condition(self, features: Tensor) -> Tensor:
        """c of tapped target features. # [..., taps * hidden] -> [..., hidden]"""
        features = features.to(self.token_norm.weight.dtype)
        if self.feature_norms:
            taps = features.chunk(len(self.feature_norms), dim=-1)
            features = torch.cat([norm(tap) for norm, tap in zip(self.feature_norms, taps, strict=True)], dim=-1)
        projected: Tensor = self.condition_proj(features)
        return projected

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


class SpecBlock(nn.Module):
    """Condition, fusion, decoder layers of the target's kind with shifts between, head and rank head. The token
    embedding is the target's own and is not kept."""

    t2d: Tensor  # [target_vocab] int64, draft id of a target token, -1 for tokens the drafter cannot propose
    d2t: Tensor  # [draft_vocab] int64, target id of a draft token

    def __init__(self, config: SpecBlockConfig) -> None:
        super().__init__()
        self.config = config
        decoder_config = _decoder_config(config)
        hidden = config.hidden_size
        self.input_layer = InputLayer(config, float(getattr(decoder_config, "rms_norm_eps", 1e-5)))
        self.decoder: PreTrainedModel = AutoModel.from_config(decoder_config, attn_implementation=ATTENTION_NAME)
        del self.decoder.embed_tokens
        self.shift_proj = nn.ModuleList(
            nn.Linear(2 * hidden, hidden, bias=False) for _ in range(config.num_layers - 1 if config.shift else 0)
        )
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + NUM_FEATURES, config.rank_hidden), nn.SiLU(), nn.Linear(config.rank_hidden, RANK_CLASSES)
        )
        self.rank_norm = nn.RMSNorm(hidden) if config.normalise_rank_inputs else None
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)
        self.register_buffer("t2d", torch.full((config.target_vocab_size,), -1), persistent=False)
        layers = list(self.decoder.get_submodule("layers").children())
        for shift, layer in zip(self.shift_proj, layers[1:], strict=False):
            layer.register_forward_pre_hook(partial(_shift, shift), with_kwargs=True)

    @property
    def kv_heads(self) -> int:
        return int(self.decoder.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        config = self.decoder.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Name the tokens that can be drafted. # d2t [draft_vocab] int64, target ids"""
        self.d2t.copy_(d2t)
        self.t2d.fill_(-1)
        self.t2d[d2t] = torch.arange(d2t.shape[0], device=self.t2d.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.input_layer.token_norm.weight.dtype

    def forward(self, rows: BlockRows, attention: RowAttention) -> Tensor:
        """States after the output norm: what the heads read, and the context of blocks that start at an entry.
        # -> [batch, rows, hidden]"""
        output = self.decoder(
            inputs_embeds=rows.inputs,
            position_ids=rows.positions,
            use_cache=False,
            draft_attention=attention,
            draft_previous=rows.previous,
        )
        states: Tensor = output.last_hidden_state
        return states

    def rank_logits(self, states: Tensor, features: Tensor) -> Tensor:
        """Scores of the rank classes (section 3.2). # states [..., hidden], features [..., 15] -> [..., 4] float32"""
        states, features = states.to(self.dtype), features.to(self.dtype)
        if self.rank_norm is not None:
            states, features = self.rank_norm(states), features * _FEATURE_SCALE
        logits: Tensor = self.rank_head(torch.cat([states, features], dim=-1))
        return logits.float()


def _shift(projection: nn.Module, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Mixes each entry's state with its predecessor's before a layer runs."""
    hidden, *rest = args  # decoders hand the states on by position
    before = torch.take_along_dim(hidden, kwargs["draft_previous"][:, :, None], dim=1)
    return (projection(torch.cat([hidden, before], dim=-1)), *rest), kwargs


def _decoder_config(config: SpecBlockConfig) -> PreTrainedConfig:
    text = AutoConfig.for_model(**copy.deepcopy(dict(config.target)))
    text.num_hidden_layers = config.num_layers
    kinds = getattr(text, "layer_types", None)
    if kinds:
        text.layer_types = kinds[-config.num_layers :]
    text.vocab_size, text.pad_token_id = 1, None  # the embedding is the target's
    return text


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    draft_attention: RowAttention,
    scaling: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; [batch, heads, rows, dim] -> [batch, rows, heads, dim]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return draft_attention.attend(layer, query, key, value, scale).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, _attention)
