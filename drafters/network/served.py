"""The SpecBlock network for serving: the weights of `model.py`, run by the ops of their device on flat rows.
Legend: rows = entries of all sequences of a forward, hidden, taps, block = K, draft_vocab, width as in `model.py`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from drafters.calibration import class_logits
from drafters.network.checkpoint import VOCABULARY
from drafters.network.config import DrafterConfig, NetworkTraits
from drafters.network.layers import LayerShape
from drafters.network.model import FEATURE_SCALE, RANK_EPSILON
from drafters.network.structure import ServedFusedInput, ServedNorm, Structure, WeightPlanner
from kernels import ops
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.lattice import TOP, BlockNetwork
from kernels.layers import RunLayers, plan_layers


class _Condition:
    """Serving form of `Input.condition`: a projection of the tapped features, whose parts are normed if there are
    norms."""

    def __init__(self, config: DrafterConfig, planner: WeightPlanner, epsilon: float) -> None:
        weights, parts = planner.weights, config.traits.normed_parts
        gains = [weights[f"input_layer.feature_norms.{part}.weight"] for part in range(parts)]
        self.gains = planner.tensor(torch.cat(gains)) if gains else None  # [taps * hidden]
        self.product = planner.product(weights["input_layer.condition_proj.weight"])
        self._norm = ServedNorm(torch.ones_like(gains[0]), epsilon, planner.ops) if gains else None

    def __call__(self, features: Tensor) -> Tensor:
        """# features [rows, taps * hidden] -> [rows, hidden]"""
        if self.gains is not None and self._norm is not None:
            normed = self._norm(features.reshape(-1, len(self._norm.weight)))
            features = normed.view(features.shape) * self.gains
        return self.product(features)


class _RankHead:
    """Serving form of the rank head, `SpecBlock.rank_logits`: from state and score features to rank-class logits."""

    def __init__(self, config: DrafterConfig, planner: WeightPlanner) -> None:
        weights = planner.weights
        self._corrects_draft = config.traits.rank_head.from_draft
        self.norm = planner.norm("rank_norm.weight", RANK_EPSILON) if config.traits.rank_head.normalised else None
        self.hidden = planner.product(weights["rank_head.0.weight"], weights.get("rank_head.0.bias"))
        self.classes = planner.product(weights["rank_head.2.weight"], weights.get("rank_head.2.bias"))

    def __call__(self, states: Tensor, features: Tensor) -> Tensor:
        """# states [..., hidden], features [..., 15] -> [..., 4] float32"""
        known, features = features, features.to(states.dtype)
        if self.norm is not None:
            states, features = self.norm(states), features * FEATURE_SCALE
        logits = self.classes(silu(self.hidden(torch.cat([states, features], dim=-1)))).float()
        return logits + class_logits(known[..., :TOP]) if self._corrects_draft else logits


class _Planned:
    """One version of the weights, bound to the ops of their device."""

    def __init__(self, structure: Structure, planner: WeightPlanner) -> None:
        config, weights = structure.config, planner.weights
        self.condition = _Condition(config, planner, structure.shape.epsilon)
        self.blocks = structure.served_input(planner)
        self.layers = structure.served_layers(planner)
        self.injected = structure.injected_into(self.layers, planner)
        self._ops = planner.ops
        self._runs: tuple[Tensor | None, list[RunLayers]] = None, []  # the pool, and the layers planned for it
        self.shifts = [
            planner.product(weights[f"shift_proj.{number}.weight"]) for number in range(config.traits.shifts)
        ]
        self.output = structure.served_output(planner)
        self.head = planner.product(weights["lm_head.weight"])
        self.rank_head = _RankHead(config, planner)
        self.path_head = structure.served_path_head(planner)
        self.block_network = self._block_network(config, planner)

    def _block_network(self, config: DrafterConfig, planner: WeightPlanner) -> BlockNetwork | None:
        """Return the weights for `plan_growth`. Returns None if blocks are not computed as SpecBlock's."""
        inputs, ranks, parts = self.blocks, self.rank_head, config.traits.normed_parts
        others = config.traits._replace(normed_parts=0, shifts=0, entries=1, restarts=False)
        if not isinstance(inputs, ServedFusedInput) or ranks.norm is None or others != NetworkTraits(0):
            return None
        return BlockNetwork(
            *(self.condition.product, inputs.known, self.head, ranks.hidden, ranks.classes, self.layers, self.shifts),
            feature_norms=self.condition.gains,
            condition_norm=inputs.condition_norm.weight,
            token_norm=inputs.token_norm.weight,
            output_norm=planner.weights["decoder.norm.weight"].detach(),
            queries=inputs.queries,
            rank_norm=ranks.norm.weight,
            parts=parts,
            broadcast=inputs.broadcast,
            epsilon=inputs.token_norm.epsilon,
            rank_epsilon=ranks.norm.epsilon,
            feature_scale=FEATURE_SCALE,
        )

    def runs(self, pool: Tensor) -> list[RunLayers]:
        """Return one callable per layer, planned for this pool. # pool as `EntryPool.storage`"""
        if self._runs[0] is not pool:
            kinds = (self._ops.plan_layers if isinstance(layer, DecoderLayer) else plan_layers for layer in self.layers)
            planned = zip(kinds, self.layers, pool, strict=True)
            self._runs = pool, [plan([layer], [own]) for plan, layer, own in planned]
        return self._runs[1]


class ServingNetwork:
    """A drafter's network for serving, whose weights can be replaced between steps."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Mapping[str, Any],
        *,
        in_8_bits: bool = False,
        in_place: bool = False,
    ) -> None:
        """`weights` by the names of `checkpoint.weights_of`, of which matrices may be quantised; they must not change
        afterwards. `in_place`: later weights overwrite these tensors, because captured graphs use their addresses;
        `in_8_bits`: products run in 8 bits."""
        self.structure: Structure = config.structure()
        self.config, self.traits = config, config.traits
        self.dtype: torch.dtype = weights["decoder.norm.weight"].dtype
        self.device: torch.device = weights[VOCABULARY].device
        self.ops = ops.on(self.device).in_8_bits() if in_8_bits else ops.on(self.device)
        self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=self.device)
        self.t2d = torch.zeros(config.target_vocab_size, dtype=torch.int64, device=self.device)
        self._in_place = in_place
        self._planned, self._kept = self._plan(weights)
        self._set_vocabulary(weights[VOCABULARY])

    @property
    def shape(self) -> LayerShape:
        """Sizes and variants of the decoder layers."""
        return self.structure.shape

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, Tensor]) -> Callable[[], None]:
        """Plan new weights, on any thread, and return a function that starts serving them, which must be called once,
        on the engine thread between steps. # weights [...] by name, in the shapes of the constructor's"""
        planned, kept = self._plan(weights)

        @torch.no_grad()
        def write() -> None:
            if self._in_place:
                for destination, value in zip(self._kept, kept, strict=True):
                    destination.copy_(value)
            else:
                self._planned = planned
            self._set_vocabulary(weights[VOCABULARY])
            kept.clear()  # a caller that keeps this function must not keep the tensors

        return write

    def _plan(self, weights: Mapping[str, Any]) -> tuple[_Planned, list[Tensor]]:
        planner = WeightPlanner(weights, self.ops, self._in_place)
        return _Planned(self.structure, planner), planner.kept

    def _set_vocabulary(self, d2t: Tensor) -> None:
        self.d2t.copy_(d2t)
        self.t2d.fill_(-1)
        self.t2d[self.d2t] = torch.arange(len(d2t), device=self.device)

    @property
    def block_network(self) -> BlockNetwork | None:
        """The current weights for `plan_growth`, or None if it does not support the network."""
        return self._planned.block_network

    def condition(self, features: Tensor) -> Tensor:
        """Return the condition c of tapped target features. # features [rows, taps * hidden] -> [rows, hidden]"""
        return self._planned.condition(features.to(self.dtype))

    def blocks(self, context: Tensor, embedded: Tensor) -> Tensor:
        """Return the first layer's input of all entries of blocks (`Input.blocks`). # context, embedded [rows, hidden]
        -> [rows, block, width]"""
        return self._planned.blocks(context, embedded)

    def states(self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """Run the layers: write keys and values to the pool, and return the states after the output norm.
        # hidden [rows, width], overwritten; previous [rows] int64, row of the previous entry of the block, or its own
        for the first; pool as `EntryPool.storage` -> [rows, width]"""
        hidden, delta, places = self._before_last(hidden, previous, places, pool)
        return self._planned.output(hidden, self._planned.runs(pool)[-1](hidden, delta, places))

    def store(self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor) -> None:
        """Write keys and values as `states` does, without computing the last layer's output.
        # hidden [rows, width], previous [rows]"""
        hidden, delta, places = self._before_last(hidden, previous, places, pool)
        self._planned.layers[-1].store(hidden, delta, places, pool[-1])

    def inject(self, context: Tensor, places: RowPlaces, pool: Tensor) -> None:
        """Compute each layer's keys and values of committed positions from their conditions, and write them to the
        pool. # context [rows, hidden]"""
        for layer, own in zip(self._planned.injected, pool, strict=True):
            layer.store(context, None, places, own)

    def conditioned(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Condition states on the token before their position. # states, embedded [rows, hidden] -> [rows, hidden]"""
        assert self._planned.path_head is not None, "this network does not condition states on tokens"
        return self._planned.path_head(states, embedded)

    def _before_last(
        self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor
    ) -> tuple[Tensor, Tensor | None, RowPlaces]:
        """Return the last layer's input, the residual update to add to it, and `places` with the columns of `hidden`
        beyond the states. # hidden [rows, width] -> both [rows, hidden]"""
        delta, shifts, width = None, self._planned.shifts, self.config.hidden_size
        if hidden.shape[1] > width:
            hidden, places = hidden[:, :width].contiguous(), replace(places, beside=hidden[:, width:])
        for number, run in enumerate(self._planned.runs(pool)[:-1]):
            delta = run(hidden, delta, places)
            if shifts:
                whole = hidden + delta
                hidden, delta = shifts[number](torch.cat([whole, whole.index_select(0, previous)], dim=-1)), None
        return hidden, delta, places

    def head(self, states: Tensor) -> Tensor:
        """Return the logits of the draft head. # states [..., hidden] -> [..., draft_vocab]"""
        return self._planned.head(states)

    def rank_logits(self, states: Tensor, features: Tensor) -> Tensor:
        """Return the logits of the rank classes. # states [..., hidden], features [..., 15] -> [..., 4] float32"""
        return self._planned.rank_head(states, features)
