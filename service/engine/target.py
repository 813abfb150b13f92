"""The target: a Hugging Face decoder run on flattened rows with our own keys and values.

A standard decoder runs as our own list of ops (`decoder.py`); of another the model's own modules compute everything but
attention (`modules.py`)."""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kernels import ops
from kernels.graph_runner import Capture
from kernels.tree_attention import AttentionRows
from service.engine.decoder import Decoder, layers_of
from service.engine.kv_pool import KVPool, SlotTable
from service.engine.rows import ForwardRows
from service.engine.sampler import EAGER_SAMPLER, Sampler
from service.errors import StartupError


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Results of one forward."""

    logits: Tensor  # [logits, vocab], unprocessed, in the model's dtype
    features: Tensor | None  # [rows, taps * hidden], tapped layer outputs, lowest layer first
    sampler: Sampler = EAGER_SAMPLER  # how to choose tokens of these logits as they are
    scored: Tensor | None = None  # [scored, vocab], of rows that choose nothing


Forward = Callable[[ForwardRows, SlotTable], TargetOutput]
"""A way to run rows: their keys and values land in `rows.slots`, logits come back for `rows.logit_rows`."""


class Target:
    """A loaded model bound to its key/value pool; it takes the model's weights over."""

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, *, tap_layers: Sequence[int] = (), in_8_bits: bool = False
    ) -> None:
        self.model = model
        self.pool = pool
        self.device = model.device
        text = model.config.get_text_config()
        self.query_heads: int = text.num_attention_heads
        self.vocab_size: int = text.vocab_size
        table = ops.on(self.device).in_8_bits() if in_8_bits else ops.on(self.device)
        self._plan_attention = table.plan_attention
        self._layers = layers_of(model, pool, table, tap_layers)
        self._forward: Forward = self.forward_once
        self.capture: Capture | None = None  # by which forwards run that go another way than one by one

    @torch.inference_mode()
    def forward(self, rows: ForwardRows, table: SlotTable, scored: Tensor | None = None) -> TargetOutput:
        """Run the rows, once and as they are, or in the way given to `run_by`; with the logits of more rows, where
        `scored` names some. # scored [scored] int64"""
        if scored is None:
            return self._forward(rows, table)
        output = self.forward_once(replace(rows, logit_rows=torch.cat([rows.logit_rows, scored])), table)
        logits, more = output.logits.split([rows.logit_rows.shape[0], scored.shape[0]])
        return replace(output, logits=logits, scored=more)

    def run_by(self, forward: Forward, capture: Capture) -> None:
        """Let forwards go a captured way from now on, which calls `compute`."""
        self._forward, self.capture = forward, capture

    @property
    def runs_by_ops(self) -> bool:
        """Whether its layers are our own list of ops, not the model's modules."""
        return isinstance(self._layers, Decoder)

    @property
    def scratch(self) -> Tensor:
        """Places of its pool for the trees of a drafter that runs it. # [places] int64"""
        return self.pool.scratch

    def first_layers(self, count: int) -> "Target":
        """The model's first layers, its norm and its head, on the same keys and values. Raises StartupError where it
        has not so many, or where they are not known one by one."""
        most = self.pool.shape.num_layers - 1
        if not 1 <= count <= most:
            raise StartupError(f"early_exit({count}): the model has {most + 1} layers; say how many, from 1 to {most}")
        if not isinstance(self._layers, Decoder):
            raise StartupError(
                "early_exit needs a model of standard layers, and this one runs as its own modules: "
                "set drafter to draft_model or memory"
            )
        first = copy(self)
        first._layers = self._layers.first(count)
        return first

    def with_pool(self, num_slots: int, scratch: int) -> "Target":
        """The same model on keys and values of its own. Raises StartupError."""
        other = copy(self)
        other.pool = KVPool(self.pool.shape, num_slots, self.device, scratch=scratch)
        return other

    def compute(
        self, tokens: Tensor, attention: AttentionRows, slots: Tensor, logit_rows: Tensor, slot_table: Tensor
    ) -> TargetOutput:
        """The model on rows: tokens, slots [rows] -> logits of `logit_rows`, features of all rows"""
        plan = self._plan_attention(
            attention, slot_table, query_heads=self.query_heads, kv_heads=self.pool.shape.kv_heads
        )
        return TargetOutput(*self._layers(tokens, attention.positions, plan, slots, logit_rows, self.pool))

    def forward_once(self, rows: ForwardRows, table: SlotTable) -> TargetOutput:
        """Run the rows as they are, each kernel by a call of its own."""
        return self.compute(rows.tokens, rows.attention, rows.slots, rows.logit_rows, table.slots)
