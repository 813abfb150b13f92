"""What differs between model families, layer by layer, as records.

All that computes layers reads them: the reference and kernels of `kernels.layers` through `DecoderLayer`, the KV pool,
and drafters. `kernels.families` makes them of a model's config.
"""

from dataclasses import dataclass
from math import inf
from typing import Generic, Literal, NamedTuple, TypeVar

from kernels.experts import Router
from kernels.layers import GateForm

T = TypeVar("T")


class Norms(NamedTuple, Generic[T]):
    """One value for each position of a decoder layer that can have a norm; None where it has no norm."""

    attention_input: T
    attention_output: T  # applied before the output is added to the hidden states; so is `mlp_output`
    mlp_input: T
    mlp_output: T


PRE_NORM = Norms[str | None]("input_layernorm", None, "post_attention_layernorm", None)
POST_NORM = Norms[str | None](None, "post_attention_layernorm", None, "post_feedforward_layernorm")
BOTH_NORMS = Norms[str | None](
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


Renamed = tuple[tuple[str, str], ...]
"""Beginnings of weights' names, and what other families call them."""


class QueryScaling(NamedTuple):
    """Factor on the queries of later positions, 1 + beta ln(1 + floor(position / length)) (Llama 4, Ministral 3)."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A layer with a state in place of attention: a causal convolution, and a matrix for each head (see
    `kernels.recurrence`). Without heads the convolution is all: of B x, multiplied by C, where the layer projects to
    B, C and x (LFM2)."""

    module: str  # within the layer
    kernel: int  # inputs that the convolution sees, its own included
    columns: int  # that are convolved
    key_heads: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    corrects: bool = False  # gated delta rule; else Mamba-2
    time_limits: tuple[float, float] = (0.0, inf)

    @property
    def input_columns(self) -> int:
        """Columns that a state reads of a row: those of the convolution, and one or two numbers of each head."""
        return self.columns + self.heads * (1 + self.corrects)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer."""

    query_heads: int
    kv_heads: int
    dim: int  # of a head
    scale: float  # factor on the scores before softmax
    window: int | None = None  # number of last positions that a row sees; None: all
    softcap: float | None = None
    rope: str | None = ""  # layer type whose rotary embedding applies, "" for a model's only one; None: no rotation
    norms: Literal["head", "projection"] | None = None  # what a norm of queries or keys spans; None without such norms
    sinks: bool = False  # softmax has one more logit per head, without a value
    query_scaling: QueryScaling | None = None
    value_norm: bool = False  # values are normed by head, without a weight
    keys_are_values: bool = False  # the projection of keys, before its norm, is that of values too
    source: int | None = None  # earlier layer whose keys and values this one reads; it projects only queries
    gated: bool = False  # each head's query is followed by a gate of its output, whose sigmoid multiplies it
    own: tuple[int, int] | None = None  # first and end of the heads whose output is projected; None: all


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """Feed-forward of one layer: down(gate(gate_up(x))), by the whole layer or by chosen experts."""

    gate: GateForm = GateForm("silu")  # noqa: RUF009 - it is frozen
    router: Router | None = None  # how experts are chosen; None: a dense feed-forward
    router_name: str = "gate"  # module of the router within `mlp`
    shared: str | None = None  # module within `mlp` of a dense feed-forward that is added to the experts' output
    shared_gated: bool = False  # it is multiplied by the sigmoid of a product of one column, `mlp.{shared}_gate`
    beside: bool = False  # experts run beside the dense feed-forward, on the hidden states; each part has norms


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer."""

    mixer: AttentionSpec | RecurrentSpec
    feed_forward: FeedForwardSpec = FeedForwardSpec()
    norms: Norms[str | None] = PRE_NORM  # module names in transformers
    norm_offset: float | None = None  # norms weight by offset + weight in float32; None: by the weight, after rounding
    residual: float = 1.0  # factor on the outputs of attention and feed-forward before they are added
    biases: tuple[bool, bool, bool] = (False, False, False)  # in q, k and v; attention output; dense feed-forward
    scaled: bool = False  # the layer's output is multiplied by its `layer_scalar`
    per_layer: int | None = None  # index of the layer, if the embeddings of tokens for each layer are added to it
    renamed: Renamed = ()

    def usual(self, name: str) -> str:
        """Return what most families call the weight that this one calls `name`."""
        return next((usual + name.removeprefix(own) for own, usual in self.renamed if name.startswith(own)), name)

    @property
    def attention(self) -> AttentionSpec:
        """The layer's attention. Raises ValueError for a recurrent layer."""
        if isinstance(self.mixer, RecurrentSpec):
            raise ValueError("a recurrent layer does not attend")
        return self.mixer


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The layers of a model, and what comes before and after them."""

    layers: tuple[LayerSpec, ...]
    epsilon: float  # of all norms
    embedding_scale: float = 1.0
    logit_divisor: float = 1.0  # of logits, before the cap
    logit_softcap: float | None = None
    per_layer_width: int = 0  # of the embeddings of tokens for each layer; 0: none
    halved_angles: bool = False  # transformers returns cosines and sines of one half of the rotated columns

    @property
    def attending(self) -> list[AttentionSpec]:
        """How the layers attend that are not recurrent."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec)]
