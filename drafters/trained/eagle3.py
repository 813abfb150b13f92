"""EAGLE-3 (arXiv 2503.01840) as its authors publish it: one position per forward, from the drafter's previous state.

The first layer's attention reads the token's embedding, concatenated with the state. Further blocks continue from the
state before the output norm. EAGLE-3.1 norms each tapped feature and continues from the normed state. Files of
speculators may have several layers.
Legend: rows, hidden."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from drafters.network import form
from drafters.network.checkpoint import TargetParts, vocabulary
from drafters.network.config import DrafterConfig, Fields, NetworkTraits, RankHeadShape
from drafters.network.form import Described, PublishedForm, Tensors, TrainedKind
from drafters.network.layers import DrafterDecoder, Input, LayerShape
from drafters.network.serving import BlockForward
from drafters.network.structure import ServedInput, ServedLayer, Structure, WeightPlanner, feature_norms
from drafters.training.forward import TrainingForward
from drafters.training.initialise import InputSums
from kernels.decoder_layer import DecoderLayer, RowPlaces


@dataclass(frozen=True, slots=True)
class Eagle3Config(DrafterConfig):
    """Config of an EAGLE-3 drafter. The defaults give the authors' network, other values EAGLE-3.1 and speculators."""

    kind: ClassVar[str] = "eagle3"
    trained_blocks: ClassVar[int] = 6
    family: ClassVar[str | None] = "llama"
    fixed: ClassVar[Fields] = {"token_beside": True, "shift": False}

    normalise_features: bool = False  # tapped features are normed
    joined_norm: bool = False  # one norm for all taps; False: one for each
    normed_residual: bool = False  # the residual of the first layer is the normed state
    continues_from: Literal["normed"] | None = None  # further blocks start at states after the output norm
    ranks_from_draft: bool = False  # the rank head corrects the class probabilities under the draft distribution

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        if self.block_size != 1:
            raise ValueError("drafter config: block_size must be 1 for kind eagle3")
        if self.continues_from not in (None, "normed"):
            raise ValueError("drafter config: continues_from must be 'normed' or null for kind eagle3")

    def structure(self) -> Structure:
        return Eagle3(self)

    @property
    def traits(self) -> NetworkTraits:
        parts = 1 if self.joined_norm else len(self.tap_layers)
        ranks = RankHeadShape(from_draft=self.ranks_from_draft)
        return NetworkTraits(parts * self.normalise_features, ranks, continues_raw=self.continues_from is None)


class TokenAndState(Input):
    """Input layer: concatenates the condition, or the state to continue from, and the normed token: [state; token]."""

    def __init__(self, config: DrafterConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.token_norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.feature_norms = feature_norms(config, shape.epsilon)

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        """Return [state; token] of each entry. # context, embedded [..., hidden] -> [..., entries, 2 * hidden]"""
        token = self.token_norm(embedded.to(self.token_norm.weight.dtype))
        return torch.cat([context.to(token.dtype), token], dim=-1)[..., None, :][..., entries, :]

    @torch.no_grad()
    def solve(self, sums: InputSums, generator: torch.Generator) -> None:
        """Set the projection to the linear regression of the next position's top tap. The first layer has to learn the
        effect of the token."""
        self.condition_proj.weight.copy_(sums.linear_guess().T)


@dataclass(frozen=True, slots=True)
class TokenAndStateLayer:
    """The first layer while serving, whose attention reads [token; normed state]."""

    layer: DecoderLayer
    normed_residual: bool

    def __call__(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layer; see `ServedLayer`. # hidden [rows, hidden] -> like hidden"""
        query = self.store(hidden, delta, places, pool)
        return self.layer.rest(query, hidden, places, pool)

    def store(self, hidden: Tensor, delta: Tensor | None, places: RowPlaces, pool: Tensor) -> Tensor:
        """Write keys and values to the pool and return the queries. # hidden [rows, hidden] -> [rows, heads, dim]"""
        assert places.beside is not None, "the tokens are beside the states"
        normed = self.layer.add_norm(hidden, delta, self.layer.norms.attention_input)
        if self.normed_residual:
            hidden.copy_(normed)
        return self.layer.attention.keep(torch.cat([places.beside, normed], dim=-1), places, pool)


class Eagle3(Structure):
    """Structure of the EAGLE-3 network."""

    serving = BlockForward
    training = TrainingForward

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self._normed_residual = config.normed_residual

    def input_layer(self) -> Input:
        return TokenAndState(self.config, self.shape)

    def decoder(self) -> DrafterDecoder:
        hidden, layers = self.config.hidden_size, self.config.num_layers
        return DrafterDecoder(self.shape, layers, hidden, normed_residual=self._normed_residual)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        token_norm = planner.norm("input_layer.token_norm.weight", self.shape.epsilon)

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            state = context[:, -embedded.shape[1] :]  # of a wider context, the last part is the state to continue from
            return torch.cat([state, token_norm(embedded.to(state.dtype))], dim=-1)[:, None]

        return blocks

    def served_layers(self, planner: WeightPlanner) -> Sequence[ServedLayer]:
        first, *others = super().served_layers(planner)
        assert isinstance(first, DecoderLayer), "the layers of other kinds"
        return [TokenAndStateLayer(first, self._normed_residual), *others]


# Published forms: of EAGLE and SpecForge (`midlayer`, norms of EAGLE-3.1), and of speculators (`layers.N`, nested
# layer config).

_NESTED = "transformer_layer_config"
_TAPS = "eagle_aux_hidden_state_layer_ids"
_LAYER = "decoder.layers.0."
_NAMES = {
    "fc.": "input_layer.condition_proj.",
    "fc_norm.": "input_layer.feature_norms.",
    "input_norm.": "input_layer.feature_norms.0.",
    "layers.": "decoder.layers.",
    **{
        f"{prefix}{theirs}": ours
        for prefix in ("midlayer.", "layers.0.")
        for theirs, ours in (
            ("", _LAYER),
            ("input_layernorm.", "input_layer.token_norm."),
            ("hidden_norm.", f"{_LAYER}input_layernorm."),
        )
    },
    "norm.": "decoder.norm.",
}
_UNREAD = ("target_hidden_size", "parallel_drafting", "sliding_window_non_causal")
"""Keys that are not supported, and refused because they would change the result."""


def _is_eagle3(described: Described) -> bool:
    """Recognise the form by its name. The oldest files have the name of a language model, and a draft vocabulary."""
    names = form.named(described)
    eagle = any("eagle3" in name.lower() for name in names)
    return eagle or (set(names) <= {"LlamaForCausalLM"} and "draft_vocab_size" in described)


def _config(described: Described, tensors: Tensors, target: TargetParts) -> Eagle3Config:
    """Read the config. With `norm_output` (EAGLE-3.1), blocks continue from the normed state, as in vLLM."""
    layers = form.layers_of(described.get(_NESTED, described), target)
    own = described.get("eagle_config") or {}
    form.refuse_set(described, _UNREAD, layers["hidden_size"])
    return Eagle3Config(
        {**layers, "num_hidden_layers": target.config["num_hidden_layers"]},
        tap_layers=_taps(described.get(_TAPS) or [layer + 1 for layer in own.get(_TAPS) or ()], target),
        draft_vocab_size=described.get("draft_vocab_size") or layers["vocab_size"],
        num_layers=layers["num_hidden_layers"],
        block_size=1,
        trained_length=described.get(form.TRAINED_LENGTH) or layers["max_position_embeddings"],
        normalise_features=bool(described.get("norm_before_fc") or described.get("fc_norm")),
        joined_norm=bool(described.get("norm_before_fc")),
        normed_residual=bool(described.get("norm_before_residual")),
        continues_from="normed" if described.get("norm_output") else None,
        ranks_from_draft=True,
    )


def _taps(counted: Sequence[int] | None, target: TargetParts) -> tuple[int, ...]:
    """Return the tapped layers. Number k of `counted` is the output of layer k - 1; if unset: 2, L / 2 and L - 3 of L
    layers. Raises ValueError for a layer that the target lacks."""
    depth = target.config["num_hidden_layers"]
    if not counted and depth < 4:
        raise ValueError(f"it taps the fourth layer from the end, and the target has {depth}")
    return form.taps_of(counted or (2, depth // 2, depth - 3), target, first=1)


def _weights(tensors: dict[str, Tensor], config: DrafterConfig, target: TargetParts) -> dict[str, Tensor]:
    form.drop_embedding(tensors, target)
    d2t = vocabulary(tensors, config)
    return {**form.renamed(tensors, _NAMES), **d2t}


FORM = PublishedForm("eagle3", _is_eagle3, lambda _: "eagle3", _config, _weights)

_SHAPE = {"block_size": 1, "num_layers": 1, "shift": False, "token_beside": True, "normalise_features": False}

KIND = TrainedKind(Eagle3Config, _SHAPE, (FORM,))
