"""The SpecBlock network as it serves: the weights of `model.py` in the ops of their device, on flat rows.

Legend: rows = of all sequences of a forward, hidden, taps, block = K, draft_vocab.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from drafters.eagle3.network import EndBeside, LayerBeside, ServedBeside
from drafters.medusa.network import ServedEntryHeads, ServedHeads
from drafters.ranks import class_logits
from drafters.specblock.checkpoint import VOCABULARY
from drafters.specblock.hand import Hand
from drafters.specblock.model import FEATURE_SCALE, RANK_EPSILON, LayerShape, SpecBlockConfig
from drafters.treeflash.network import ServedPathHead
from kernels import ops
from kernels.decoder_layer import DecoderLayer, RowPlaces
from kernels.layers import RunLayers
from kernels.layers import plan_layers as op_by_op
from kernels.rank_features import TOP


class _FusedInput:
    """The input of drafters with layers: condition, token and position query, as of `InputLayer.blocks`."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape, hand: Hand) -> None:
        hidden, weights = config.hidden_size, hand.weights
        self._ops, self._epsilon, self._broadcast = hand.table, shape.epsilon, config.broadcast
        self._condition_norm = hand.vector("input_layer.condition_norm.weight")
        self._token_norm = hand.vector("input_layer.token_norm.weight")
        fuse = weights["input_layer.fuse.weight"]
        self._known = hand.product(fuse[:, : 2 * hidden].contiguous())
        queries = torch.rms_norm(weights["input_layer.position_queries"], (hidden,), None, shape.epsilon)
        queries = queries * weights["input_layer.query_norm.weight"]
        # What the position queries add to an entry is the same in every block.
        asked = linear(queries.float(), fuse[:, 2 * hidden :].float())
        self._asked = hand.tensor(asked.to(fuse.dtype))  # [block, hidden]

    def __call__(self, context: Tensor, embedded: Tensor) -> Tensor:
        """# [rows, hidden] -> [rows, block, hidden]"""
        known = [
            self._ops.add_rms_norm(context.contiguous(), None, self._condition_norm, self._epsilon),
            self._ops.add_rms_norm(embedded.to(context.dtype).contiguous(), None, self._token_norm, self._epsilon),
        ]
        seen = self._known(torch.cat(known, dim=-1))[:, None]
        if self._broadcast:
            return seen + self._asked
        blocks = self._asked.expand(len(seen), -1, -1).clone()
        blocks[:, :1] += seen
        return blocks


def _served_input(config: SpecBlockConfig, shape: LayerShape, hand: Hand) -> Callable[[Tensor, Tensor], Tensor]:
    """As `SpecBlock.input_layer.blocks`, of all entries."""
    if config.token_beside:
        return ServedBeside(hand, shape.epsilon)
    return _FusedInput(config, shape, hand) if config.num_layers else ServedHeads(hand)


def _served_end(config: SpecBlockConfig, shape: LayerShape, hand: Hand) -> Callable[[Tensor, Tensor | None], Tensor]:
    """States of what went into the last layer and what came out of it."""
    if config.own_heads:
        return lambda hidden, delta: hidden
    norm, ops = hand.vector("decoder.norm.weight"), hand.table
    if config.token_beside:
        return EndBeside(ops, norm, shape.epsilon)
    return lambda hidden, delta: ops.add_rms_norm(hidden, delta, norm, shape.epsilon)


class _Planned:
    """One version of the weights, ready for the ops of their device."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape, hand: Hand) -> None:
        weights = hand.weights
        gains = [weights[f"input_layer.feature_norms.{tap}.weight"] for tap in _taps(config)]
        self.gains = hand.tensor(torch.cat(gains)) if gains else None  # [taps * hidden]
        self.condition = hand.product(weights["input_layer.condition_proj.weight"])
        self.blocks = _served_input(config, shape, hand)
        window = config.trained_length * config.entries
        layers = [hand.layer(number, shape, window) for number in range(config.num_layers)]
        beside = [LayerBeside(layer) for layer in layers] if config.token_beside else []
        self.layers: Sequence[DecoderLayer | LayerBeside] = beside or layers
        self._runs: list[RunLayers] = []
        self._planned_for: Tensor | None = None  # pool
        self._plan_layers = op_by_op if config.token_beside else hand.table.plan_layers
        further = range(config.num_layers - 1 if config.shift else 0)
        self.shifts = [hand.product(weights[f"shift_proj.{number}.weight"]) for number in further]
        self.end = _served_end(config, shape, hand)
        self.head = ServedEntryHeads(hand) if config.own_heads else hand.product(weights["lm_head.weight"])
        self.rank_norm = hand.vector("rank_norm.weight") if config.normalise_rank_inputs else None
        self.rank_hidden = hand.product(weights["rank_head.0.weight"], weights["rank_head.0.bias"])
        self.rank_classes = hand.product(weights["rank_head.2.weight"], weights["rank_head.2.bias"])
        self.path_head = ServedPathHead(hand, shape.epsilon) if config.traits.conditioned else None

    def runs(self, pool: Tensor) -> list[RunLayers]:
        """The layers, each in one call. # pool as of `EntryPool`"""
        if self._planned_for is not pool:
            self._runs = [self._plan_layers([layer], [own]) for layer, own in zip(self.layers, pool, strict=True)]
            self._planned_for = pool
        return self._runs


class ServingNetwork:
    """A drafter's network whose weights may be replaced between steps."""

    def __init__(
        self,
        config: SpecBlockConfig,
        weights: Mapping[str, Tensor],
        *,
        in_8_bits: bool = False,
        in_place: bool = False,
    ) -> None:
        """Weights by name, as of `checkpoint.weights_of`, which may not change any more; `in_place`: those that come
        later are written where the first ones are, whose addresses graphs have captured; products must read them there.
        """
        self.config, self.shape = config, LayerShape.of(config)
        head = weights["lm_head.weight"]
        self.dtype, self.device = head.dtype, head.device
        self.ops = ops.on(self.device).in_8_bits() if in_8_bits else ops.on(self.device)
        self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64, device=self.device)
        self.t2d = torch.zeros(config.target_vocab_size, dtype=torch.int64, device=self.device)
        self._in_place = in_place
        self._planned, self._kept = self._plan(weights)
        self._set_vocabulary(weights[VOCABULARY])
        self._unit = torch.ones(config.hidden_size, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def prepare(self, weights: Mapping[str, Tensor]) -> Callable[[], None]:
        """Makes other weights ready, in any thread; what it returns is called once, by the one that computes, between
        steps."""
        planned, kept = self._plan(weights)

        @torch.no_grad()
        def write() -> None:
            if self._in_place:
                for place, value in zip(self._kept, kept, strict=True):
                    place.copy_(value)
                kept.clear()  # whoever holds on to this function shall not hold on to them
            else:
                self._planned = planned
            self._set_vocabulary(weights[VOCABULARY])

        return write

    def _plan(self, weights: Mapping[str, Tensor]) -> tuple[_Planned, list[Tensor]]:
        hand = Hand(weights, self.ops, self._in_place)
        return _Planned(self.config, self.shape, hand), hand.kept

    def _set_vocabulary(self, d2t: Tensor) -> None:
        self.d2t.copy_(d2t)
        self.t2d.fill_(-1)
        self.t2d[self.d2t] = torch.arange(len(d2t), device=self.device)

    def condition(self, features: Tensor) -> Tensor:
        """c of tapped target features. # [rows, taps * hidden] -> [rows, hidden]"""
        planned, features = self._planned, features.to(self.dtype)
        if planned.gains is not None:
            by_tap = features.reshape(-1, self.config.hidden_size)
            normed = self.ops.add_rms_norm(by_tap, None, self._unit, self.shape.epsilon)
            features = normed.view(features.shape) * planned.gains
        return planned.condition(features)

    def blocks(self, context: Tensor, embedded: Tensor) -> Tensor:
        """h0 of the entries of blocks. # context, embedded [rows, hidden] -> [rows, block, hidden]"""
        return self._planned.blocks(context, embedded)

    def states(self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor) -> Tensor:
        """States after the output norm; keys and values go to the pool. # hidden [rows, hidden + beside], overwritten;
        previous [rows] int64, the row of the entry before, or its own; pool as of `EntryPool` -> as of `SpecBlock`"""
        hidden, delta = self._before_last(hidden, previous, places, pool)
        for run in self._planned.runs(pool)[-1:]:
            delta = run(hidden, delta, places)
        return self._planned.end(hidden, delta)

    def store(self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor) -> None:
        """As `states`, without what would come of it."""
        hidden, delta = self._before_last(hidden, previous, places, pool)
        for layer in self._planned.layers[-1:]:
            layer.store(hidden, delta, places, pool[-1])

    def inject(self, context: Tensor, places: RowPlaces, pool: Tensor) -> None:
        """Keys and values of each layer, made of committed positions' conditions, go to the pool.
        # context [rows, hidden]"""
        for layer, own in zip(self._planned.layers, pool, strict=True):
            layer.store(context, None, places, own)

    def told(self, states: Tensor, embedded: Tensor) -> Tensor:
        """States that know the token before them. # states, embedded [..., hidden] -> [..., hidden]"""
        assert self._planned.path_head is not None, "no kind whose states are told a token"
        return self._planned.path_head(states, embedded)

    def _before_last(
        self, hidden: Tensor, previous: Tensor, places: RowPlaces, pool: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What the last layer receives."""
        delta, shifts = None, self._planned.shifts
        for number, run in enumerate(self._planned.runs(pool)[:-1]):
            delta = run(hidden, delta, places)
            if shifts:
                whole = hidden + delta
                hidden, delta = shifts[number](torch.cat([whole, whole.index_select(0, previous)], dim=-1)), None
        return hidden, delta

    def head(self, states: Tensor) -> Tensor:
        """# [..., hidden] -> logits [..., draft_vocab]"""
        return self._planned.head(states)

    def rank_logits(self, states: Tensor, features: Tensor) -> Tensor:
        """As of `SpecBlock`. # states [..., hidden], features [..., 15] -> [..., 4] float32"""
        planned, known, features = self._planned, features, features.to(self.dtype)
        if planned.rank_norm is not None:
            states = self.ops.add_rms_norm(states.contiguous(), None, planned.rank_norm, RANK_EPSILON)
            features = features * FEATURE_SCALE
        logits = planned.rank_classes(silu(planned.rank_hidden(torch.cat([states, features], dim=-1)))).float()
        return logits + class_logits(known[..., :TOP]) if self.config.ranks_from_draft else logits


def _taps(config: SpecBlockConfig) -> range:
    return range(len(config.tap_layers) if config.normalise_features else 0)
