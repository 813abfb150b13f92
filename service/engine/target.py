"""The target: any Hugging Face decoder, run on flattened rows with our own keys and values.

The model's own modules compute everything but attention, which reaches our slot-addressed pool through transformers'
attention interface.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kernels import ops
from kernels.exact_rows import exact_row_multiple
from kernels.tree_attention import WIDTH, Attention, AttentionRows
from service.engine import linear
from service.engine.kv_pool import KVPool, SlotTable
from service.engine.rows import ForwardRows
from service.engine.sampler import EAGER_SAMPLER, Sampler
from service.errors import StartupError

ATTENTION_NAME = "adaptree"


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of one forward needs; travels through the model as a forward argument."""

    plan: Attention
    pool: KVPool
    places: Tensor  # [2, rows] int64, where the rows' keys and values go in a layer; without padding rows
    is_first: bool  # the model's first forward, which is checked for what we do not implement
    layers: list[int] = field(default_factory=list)  # those that have attended in the first forward

    def refuse_bypass(self) -> None:
        """Raise StartupError when a layer attended in a way of its own, or more than once."""
        if self.is_first and self.layers != list(range(self.pool.storage.shape[0])):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; adaptree cannot run it"
            )


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Results of one forward."""

    logits: Tensor  # [logits, vocab], unprocessed, in the model's dtype
    features: Tensor | None  # [rows, taps * hidden], tapped layer outputs, lowest layer first
    sampler: Sampler = EAGER_SAMPLER  # how to choose tokens of these logits as they are


Forward = Callable[[ForwardRows, SlotTable], TargetOutput]
"""A way to run rows: their keys and values land in `rows.slots`, logits come back for `rows.logit_rows`."""


class Target:
    """A loaded model bound to its key/value pool."""

    def __init__(
        self, model: PreTrainedModel, pool: KVPool, *, row_multiple: int = 1, tap_layers: Sequence[int] = ()
    ) -> None:
        self.model = model
        self.pool = pool
        self.row_multiple = row_multiple
        self.fewest_rows = linear.fewest_rows(model)
        self.device = model.device
        text = model.config.get_text_config()
        self.query_heads: int = text.num_attention_heads
        self.vocab_size: int = text.vocab_size
        self._taps = FeatureTaps(decoder_layers(model), tap_layers) if tap_layers else None
        self._ops = ops.on(self.device)
        self._member_multiple = exact_row_multiple(WIDTH, pool.shape.head_dim, self.device)
        self._is_first = True
        self._forward: Forward = self.forward_once

    @torch.inference_mode()
    def forward(self, rows: ForwardRows, table: SlotTable) -> TargetOutput:
        """Run the rows, once and as they are, or in the way given to `run_by`."""
        return self._forward(rows, table)

    @property
    def is_captured(self) -> bool:
        """Whether forwards go another way than one by one."""
        return self._forward != self.forward_once

    def run_by(self, forward: Forward) -> None:
        """Let forwards go another way from now on, which calls `compute`."""
        self._forward = forward

    def compute(
        self,
        tokens: Tensor,
        attention: AttentionRows,
        slots: Tensor,
        logit_rows: Tensor | slice,
        slot_table: Tensor,
        *,
        padding: int = 0,
    ) -> TargetOutput:
        """The model itself on rows that need no more padding than `padding` says.

        tokens [rows + padding], slots [rows]; -> logits of `logit_rows`, features of all rows
        """
        plan = self._ops.plan_attention(
            attention,
            slot_table,
            num_slots=self.pool.num_places,
            query_heads=self.query_heads,
            kv_heads=self.pool.shape.kv_heads,
            member_multiple=self._member_multiple,
            padding=padding,
        )
        step = AttentionStep(plan, self.pool, self.pool.places(slots), self._is_first)
        output = self.model(
            input_ids=tokens[None],
            position_ids=_padded(attention.positions, padding)[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            tree_step=step,
        )
        step.refuse_bypass()
        self._is_first = False
        return TargetOutput(output.logits[0], self._taps.take(slots.shape[0]) if self._taps else None)

    def forward_once(self, rows: ForwardRows, table: SlotTable) -> TargetOutput:
        """Run the rows as they are, each kernel by a call of its own."""
        padding, num_logits = self.padding(rows.num_rows), rows.logit_rows.shape[0]
        wanted = _padded(rows.logit_rows, self.padding(num_logits)) if num_logits else slice(0, self.padding(0))
        output = self.compute(
            _padded(rows.tokens, padding), rows.attention, rows.slots, wanted, table.slots, padding=padding
        )
        return TargetOutput(output.logits[:num_logits], output.features)

    def padding(self, count: int) -> int:
        """Rows to add: up to the number below which products get dearer, then to the multiple that keeps them equal."""
        wanted = max(count, self.fewest_rows)
        return wanted - count + -wanted % self.row_multiple


def _padded(values: Tensor, missing: int) -> Tensor:
    """The first entry repeated as often as padding rows are needed."""
    return torch.cat([values, values[:1].expand(missing)]) if missing else values


class FeatureTaps:
    """Forward hooks that keep the outputs of some layers, because the index of a layer in transformers' own
    `output_hidden_states` changed between releases."""

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int]) -> None:
        self._outputs: list[Tensor] = [torch.empty(0)] * len(indices)
        for place, index in enumerate(indices):
            layers[index].register_forward_hook(self._keeper(place))

    def _keeper(self, place: int):  # type: ignore[no-untyped-def]  # torch types hooks as Any
        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[place] = output if isinstance(output, Tensor) else output[0]

        return keep

    def take(self, num_rows: int, line: int = 0) -> Tensor:
        """The last forward's features of one line's first rows. # -> [rows, taps * hidden]"""
        return torch.cat([output[line, :num_rows] for output in self._outputs], dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of decoder layers."""
    layers = model.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def default_tap_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose outputs make a drafter's condition: low, middle and high (SpecBlock section 3.1)."""
    return (min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0))


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_step: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers.

    query [1, query heads, rows, head_dim], key/value [1, kv_heads, rows, head_dim], after rotary embedding;
    returns [1, rows, query heads, head_dim]. Raises StartupError for anything that would change the result unseen.
    """
    if tree_step.is_first:
        refuse_unknown(module, {**unused, "attention_mask": attention_mask}, "which adaptree does not implement")
        tree_step.pool.refuse_other_shape(key, value)
        tree_step.layers.append(module.layer_idx)  # type: ignore[arg-type]
    num_rows = tree_step.places.shape[1]
    keys, values = key.transpose(1, 2)[0, :num_rows], value.transpose(1, 2)[0, :num_rows]
    tree_step.pool.write(module.layer_idx, tree_step.places, keys, values)  # type: ignore[arg-type]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = tree_step.pool.layer(module.layer_idx)  # type: ignore[arg-type]
    rows = query.transpose(1, 2)[0]
    return tree_step.plan.attend(rows, layer, scale=scale, window=sliding_window, softcap=softcap)[None], None


_HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "is_causal",
        "output_attentions",
        "logits_to_keep",
        "output_router_logits",
    }
)


def refuse_unknown(module: nn.Module, arguments: dict[str, object], consequence: str) -> None:
    """Raise StartupError when attention is asked for something that would change its result unseen."""
    looks_ahead = None if getattr(module, "is_causal", True) else True
    named = {**arguments, "two-way attention": looks_ahead}
    unknown = [name for name, value in named.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise StartupError(f"this model's attention passes {', '.join(sorted(unknown))}, {consequence}")


AttentionInterface.register(ATTENTION_NAME, slot_attention)
