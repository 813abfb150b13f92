"""The target model: a transformers decoder that runs on flattened rows with our own KV pool.

A standard decoder runs by our own ops (`decoder.py`), any other by its own modules with our attention (`modules.py`).
Legend: rows = tokens of one forward, logits = rows from whose logits a token is chosen.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from drafters.readback import Arriving, arriving
from kernels import ops
from kernels.graph_runner import Capture
from kernels.recurrence import StateRows
from kernels.rows import ForwardRows
from kernels.tree_attention import AttentionRows
from service.engine.decoder import FusedDecoder, Layers, LogitRows, SharedDecoder, layers_of, planner_of
from service.engine.kv_pool import KVPool, SlotTable
from service.engine.peers import ALONE, Peers
from service.engine.sampling import EAGER_SAMPLER, Sampler
from service.engine.shards import ModelShard


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Logits and features of one forward."""

    logits: Tensor  # [logits, vocab], unprocessed, in the model's dtype
    features: Tensor | None  # [rows, taps * hidden], outputs of the tapped layers, lowest layer first
    sampler: Sampler = EAGER_SAMPLER  # sampler for these logits unless a transform changes them
    scored: Tensor | None = None  # [scored, vocab], logits of prompt rows whose tokens are scored


Forward = Callable[[ForwardRows, SlotTable, bool], TargetOutput]
"""Runs a forward: writes the keys and values of all rows to `rows.slots`, returns the logits of `rows.logit_rows`, and
features if they are wanted."""


class Target:
    """A loaded model with its KV pool. It owns the model's weights: `model` itself can no longer be run."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        part: ModelShard | None = None,
        peers: Peers = ALONE,
        *,
        tap_layers: Sequence[int] = (),
        in_8_bits: bool = False,
    ) -> None:
        """`part`: what this process has of a model that it shares with `peers`; None: all of it."""
        self.model = model
        self.pool = pool
        self.device = model.device
        text = model.config.get_text_config()
        self.query_heads: int = part.own_spec.attending[0].query_heads if part else text.num_attention_heads
        self.vocab_size: int = text.vocab_size
        table = ops.on(self.device).in_8_bits() if in_8_bits else ops.on(self.device)
        self._plan_attention = planner_of(table, self.query_heads)
        self.peers = peers
        self._layers: Layers = (
            layers_of(model, pool, table, tap_layers)
            if part is None
            else SharedDecoder(model, part, peers, table, tap_layers)
        )
        self._forward: Forward = self.forward_once
        self.capture: Capture | None = None  # None if forwards run eagerly
        self._no_tokens: Tensor | None = None  # [no_tokens] int64, ids of the vocabulary that are no tokens

    @torch.inference_mode()
    def forward(
        self, rows: ForwardRows, table: SlotTable, scored: Tensor | None = None, *, features: bool = True
    ) -> TargetOutput:
        """Run a forward, captured if `run_by` was called. `scored`: further rows whose logits are returned as
        `TargetOutput.scored`; with them the forward runs eagerly. `features`: whether they are wanted.
        # scored [scored] int64"""
        if scored is None:
            return self._forward(rows, table, features)
        logit_rows = torch.cat([rows.logit_rows, scored])
        output = self._computed(rows, logit_rows, table, features)
        logits, more = output.logits.split([rows.logit_rows.shape[0], scored.shape[0]])
        return replace(output, logits=logits, scored=more)

    def arriving(self, values: Tensor, *, at_once: bool) -> Arriving:
        """Begin to copy values to the host; see `readback.arriving`. # values [...]"""
        return arriving(values, at_once=at_once)

    def never_choose(self, ids: Sequence[int]) -> None:
        """Set the logits of these ids to -inf from now on; for ids in the model's vocabulary that are no tokens. Must
        be called before forwards are captured."""
        self._no_tokens = torch.tensor(ids, device=self.device) if ids else None

    def run_by(self, forward: Forward, capture: Capture) -> None:
        """Run forwards by `forward` from now on, which replays captures of `compute`."""
        self._forward, self.capture = forward, capture

    @property
    def runs_by_ops(self) -> bool:
        """Whether the layers run by our own ops, not by the model's modules."""
        return isinstance(self._layers, FusedDecoder)

    @property
    def scratch(self) -> Tensor:
        """Scratch places of the pool, for the trees of a drafter that runs this model. # [scratch] int64"""
        return self.pool.scratch

    def with_pool(self, num_slots: int, scratch: int) -> "Target":
        """Return a copy of this target that shares the weights but has a KV pool of its own."""
        other = copy(self)
        other.pool = KVPool(self.pool.shape, num_slots, self.device, scratch=scratch)
        return other

    def compute(
        self,
        tokens: Tensor,
        attention: AttentionRows,
        slots: Tensor,
        logit_rows: LogitRows,
        slot_table: Tensor,
        *,
        features: bool = True,
        states: StateRows | None = None,
    ) -> TargetOutput:
        """Run the model on flattened rows, eagerly; this is the part of a forward that is captured.
        # tokens, slots [rows]; logit_rows [logits]; slot_table [sequences, positions]; all int64"""
        with self.peers.guarded():
            self.peers.tell(self.pool, attention, slots, logit_rows, slot_table)
            groups = self.pool.groups(attention, slots, slot_table, self._plan_attention)
            logits, tapped = self._layers(tokens, attention.positions, groups, logit_rows, self.pool, features, states)
        if self._no_tokens is not None:
            logits.index_fill_(1, self._no_tokens, -math.inf)
        return TargetOutput(logits, tapped)

    def forward_once(self, rows: ForwardRows, table: SlotTable, features: bool = True) -> TargetOutput:
        """Run a forward eagerly, even if `run_by` was called."""
        all_choose = rows.logit_rows.shape == rows.tokens.shape  # and then they choose in their order
        logit_rows = slice(None) if all_choose else rows.logit_rows
        return self._computed(rows, logit_rows, table, features)

    def _computed(self, rows: ForwardRows, logit_rows: LogitRows, table: SlotTable, features: bool) -> TargetOutput:
        how = rows.tokens, rows.attention, rows.slots, logit_rows, table.slots
        return self.compute(*how, features=features, states=rows.states)
