"""A decoder's own modules on flattened rows, with our attention over the slots of our pool.

How every family runs for which there is no list of ops of ours (`decoder.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kernels.tree_attention import Attention
from service.engine.kv_pool import KVPool
from service.errors import StartupError

ATTENTION_NAME = "adaptree"


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What one layer's attention asks for beside queries and keys."""

    layer: int
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of one forward needs; travels through the model as a forward argument."""

    plan: Attention
    pool: KVPool
    slots: Tensor  # [rows] int64
    forms: list[AttentionForm] | None  # of those that have attended, in the first forward, which is checked


class ModuleLayers:
    """The model itself. Raises StartupError, in its first forward, for what would change its result unseen."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        self.forms: list[AttentionForm] = []
        self._model = model
        self._taps = FeatureTaps(decoder_layers(model), tap_layers) if tap_layers else None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        slots: Tensor,
        logit_rows: Tensor | slice,
        pool: KVPool,
    ) -> tuple[Tensor, Tensor | None]:
        """As `service.engine.decoder.Layers`."""
        step = AttentionStep(attention, pool, slots, None if self.forms else self.forms)
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            tree_step=step,
        )
        if step.forms is not None and [form.layer for form in step.forms] != list(range(pool.shape.num_layers)):
            raise StartupError(
                "this model has layers whose attention is not one plain attention each; adaptree cannot run it"
            )
        return output.logits[0], self._taps.take(slots.shape[0]) if self._taps else None


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


def default_tap_layers(num_layers: int, *, copied: int = 2) -> tuple[int, int, int]:
    """Layers whose outputs make a drafter's condition: low, middle and high (SpecBlock section 3.1); behind the high
    one come those that the drafter has `copied`."""
    return (min(2, num_layers - 1), num_layers // 2, max(num_layers - 1 - copied, 0))


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
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if tree_step.forms is not None:
        refuse_unknown(module, {**unused, "attention_mask": attention_mask}, "which adaptree does not implement")
        tree_step.pool.refuse_other_shape(key, value)
        tree_step.forms.append(AttentionForm(layer, scale, sliding_window, softcap))
    tree_step.pool.write(layer, tree_step.slots, key.transpose(1, 2)[0], value.transpose(1, 2)[0])
    rows, kept = query.transpose(1, 2)[0], tree_step.pool.layer(layer)
    return tree_step.plan.attend(rows, kept, scale=scale, window=sliding_window, softcap=softcap)[None], None


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
