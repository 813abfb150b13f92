"""Runs a model by its own transformers modules on flattened rows, with our attention over the KV pool, if our ops do
not compute the same (`decoder.py`). Also defines linear layers and embeddings that kernels or quantised blocks compute.

Legend: rows = tokens of one forward, hidden = the model's width, dim = head_dim.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kernels.experts import Experts, QuantisedStack, StackedWeight, plan_experts
from kernels.layers import GateForm, Product, QuantisedWeight, Weight, gate_mul
from kernels.ops import Ops
from kernels.recurrence import StateRows
from kernels.tree_attention import AttentionForm, KVRows
from service.engine.kv_pool import KVPool, LayerKV
from service.errors import StartupError

ATTENTION_NAME = "adaptree"


LayerForms = list[tuple[int, AttentionForm]]
"""Calls of attention: index of the layer, and its form."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Inputs of one forward's attention, passed through the model's modules as a keyword argument."""

    groups: tuple[KVRows, ...]
    pool: KVPool
    forms: LayerForms | None  # collects the calls of the first forward, which is checked; None later


class ModuleLayers:
    """Runs a model by its own modules. The first forward raises StartupError if our attention cannot replace the
    model's."""

    def __init__(self, model: PreTrainedModel, tap_layers: Sequence[int] = ()) -> None:
        self.forms: LayerForms = []
        self._model = model
        self._taps = FeatureTaps(decoder_layers(model), tap_layers) if tap_layers else None

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        groups: tuple[KVRows, ...],
        logit_rows: Tensor | slice,
        pool: KVPool,
        features: bool = True,
        states: StateRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a forward; see `service.engine.decoder.Layers`. Its hooks keep features even if they are not wanted."""
        assert states is None, "modules have states of their own"
        step = AttentionStep(groups, pool, None if self.forms else self.forms)
        output = self._model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            tree_step=step,
        )
        attending = [index for index, layer in enumerate(pool.shape.layers) if isinstance(layer, LayerKV)]
        if step.forms is not None and [layer for layer, _ in step.forms] != attending:
            raise StartupError("this model has layers that do not call attention exactly once; adaptree cannot run it")
        tapped = self._taps.take(tokens.shape[0]) if self._taps else None
        return output.logits[0], tapped if features else None


class FeatureTaps:
    """Keeps the outputs of the tapped layers by forward hooks. transformers' own `output_hidden_states` is not used,
    because its layer indices changed between releases."""

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int]) -> None:
        self._outputs: list[Tensor] = [torch.empty(0)] * len(indices)
        for place, index in enumerate(indices):
            layers[index].register_forward_hook(partial(self._keep, place))

    def _keep(self, place: int, layer: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._outputs[place] = output if isinstance(output, Tensor) else output[0]

    def take(self, num_rows: int, sequence: int = 0) -> Tensor:
        """Return the last forward's features of the first `num_rows` rows of one sequence.
        # -> [rows, taps * hidden]"""
        return torch.cat([output[sequence, :num_rows] for output in self._outputs], dim=-1)


def empty_model(config: PreTrainedConfig, dtype: torch.dtype, attention: str = ATTENTION_NAME) -> PreTrainedModel:
    """Build a model whose parameters have shapes and no memory. `attention`: name of its attention function."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of decoder layers."""
    layers = model.get_decoder().layers
    assert isinstance(layers, nn.ModuleList)
    return layers


def last_norm(model: PreTrainedModel) -> nn.Module:
    """The norm of the last layer's output."""
    parts: dict[str, nn.Module] = dict(model.get_decoder().named_children())
    return parts["norm"] if "norm" in parts else parts["embedding_norm"]  # LFM2's is the latter


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_step: AttentionStep,
    **options: object,
) -> tuple[Tensor, None]:
    """Write keys and values to the pool and attend over its slots; the attention function that transformers calls.

    query [1, query heads, rows, dim], key and value [1, kv_heads, rows, dim], after rotary embedding
    -> [1, rows, query heads, dim]. Of transformers' `options`, `scaling`, `sliding_window`, `softcap` and `s_aux`
    (sinks) are applied; raises StartupError for others that would change the result.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    scaling, window, softcap, sinks = (options.pop(name, None) for name in _APPLIED)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = sinks.detach().float() if isinstance(sinks, Tensor) else None
    form = AttentionForm(scale, window, softcap, sinks)  # type: ignore[arg-type]  # transformers types options as Any
    if tree_step.forms is not None:
        refuse_unknown(module, {**options, "attention_mask": attention_mask}, "which adaptree does not implement")
        tree_step.pool.refuse_other_shape(layer, key, value, form.window)
        tree_step.forms.append((layer, form))
    group = tree_step.groups[0 if form.window is None else -1]
    tree_step.pool.write(layer, group.slots, key.transpose(1, 2)[0], value.transpose(1, 2)[0])
    rows, kept = query.transpose(1, 2)[0], tree_step.pool.layer(layer)
    return group.attention.attend(rows, kept, form)[None], None


_APPLIED = "scaling", "sliding_window", "softcap", "s_aux"
_HARMLESS = frozenset(
    {
        "dropout",  # 0 outside of training
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
    """Raise StartupError if attention gets an argument that would change its result; `consequence`: end of the
    message."""
    looks_ahead = None if getattr(module, "is_causal", True) else True
    named = {**arguments, "bidirectional attention": looks_ahead}
    unknown = [name for name, value in named.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise StartupError(f"this model's attention passes {', '.join(sorted(unknown))}, {consequence}")


AttentionInterface.register(ATTENTION_NAME, slot_attention)


class PlannedLinear(nn.Module):
    """`nn.Linear` computed by a kernel that holds the weights in its own layout."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        return self.product(x)

    __call__ = forward  # there are no hooks, and the search for them costs as much as a small product


class QuantisedLinear(nn.Module):
    """`nn.Linear` on quantised blocks that dequantises them at each call: slow, a reference for the kernels."""

    def __init__(self, weight: QuantisedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight: QuantisedWeight = weight
        self.bias: nn.Parameter | None = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]"""
        some = torch.arange(self.weight.shape[0]).split(4096)  # all of an output layer in float32 take a gigabyte
        y = torch.cat([x @ self.weight.lookup(rows).mT for rows in some], dim=-1)
        return y if self.bias is None else y + self.bias

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self.weight.dense()


class QuantisedEmbedding(nn.Module):
    """`nn.Embedding` on quantised blocks."""

    def __init__(self, weight: QuantisedWeight, scale: float) -> None:
        """`scale`: factor by which the model family multiplies embeddings."""
        super().__init__()
        self.weight = weight
        self._scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., hidden]"""
        found = self.weight.lookup(tokens)
        return found if self._scale == 1 else found * self._scale


STACKS = ("gate_up_proj", "down_proj")
"""Names of the matrices of transformers' modules of experts."""
EXPERT_WEIGHTS = (*STACKS, "gate_up_proj_bias", "down_proj_bias")


class QuantisedExperts(nn.Module):
    """Experts of a layer on quantised blocks, gate rows before up rows. Weights that are not quantised stay in
    transformers' layout."""

    def __init__(self, experts: nn.Module, stacks: Mapping[str, QuantisedStack]) -> None:
        """`experts`: transformers' module; `stacks`: the quantised ones of its matrices, by name. Raises ValueError for
        another feed-forward."""
        super().__init__()
        self.gate: GateForm = _gate_of(experts)
        self.is_transposed, self.is_concatenated = bool(experts.is_transposed), bool(experts.is_concatenated)
        kept = {name: value for name, value in experts.named_parameters(recurse=False) if name not in stacks}
        for name, weight in (*kept.items(), *stacks.items()):
            setattr(self, name, weight)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum the chosen experts' outputs, by the reference, which holds no second copy of the weights.
        # hidden [rows, hidden]; indices [rows, chosen] int64, weights [rows, chosen] -> [rows, hidden]"""
        return PlannedExperts(plan_experts(*expert_weights(self))).forward(hidden, indices, weights)


class PlannedExperts(nn.Module):
    """Experts of a layer computed by an op that holds their weights."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self._experts = experts

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum the chosen experts' outputs; the order in which a row names its experts does not matter.
        # hidden [rows, hidden]; indices [rows, chosen] int64, weights [rows, chosen] -> [rows, hidden]"""
        chosen, order = indices.sort(-1)
        return self._experts(hidden, chosen, weights.float().gather(-1, order))


ExpertWeights = tuple[StackedWeight, StackedWeight, Tensor | None, Tensor | None, GateForm]
"""Arguments of the op `plan_experts`."""


def expert_weights(module: nn.Module) -> ExpertWeights:
    """Collect the weights of transformers' experts or of `QuantisedExperts` in the layout of the op. Raises ValueError
    for another feed-forward."""
    gate = module.gate if isinstance(module, QuantisedExperts) else _gate_of(module)

    def of(name: str) -> Any:
        weight = getattr(module, name, None)
        if not isinstance(weight, Tensor):
            return weight
        weight = weight.mT if name in STACKS and module.is_transposed else weight
        interleaved = not module.is_concatenated and name.startswith("gate")
        return torch.cat((weight[:, ::2], weight[:, 1::2]), dim=1) if interleaved else weight.contiguous()

    return (*map(of, EXPERT_WEIGHTS), gate)


def layer_weights(layer: nn.Module) -> dict[str, Any]:
    """Collect all weights of a decoder layer by transformers' names, those of experts as `plan_experts` takes them.
    Raises ValueError for experts with another feed-forward."""
    weights: dict[str, Any] = {**weights_of(layer), **dict(layer.named_buffers())}
    for place, experts in layer.named_modules():
        if is_experts(experts):
            *found, _ = expert_weights(experts)
            named = zip(EXPERT_WEIGHTS, found, strict=True)
            weights |= {f"{place}.{name}": weight for name, weight in named if weight is not None}
    return weights


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of a layer's experts, in transformers' form or in ours."""
    return isinstance(module, QuantisedExperts) or getattr(getattr(module, STACKS[0], None), "ndim", 0) == 3


def _gate_of(experts: nn.Module) -> GateForm:
    """Find the gate that computes the same as that of transformers' experts, on random numbers. Raises ValueError if
    there is none."""
    if getattr(experts, "has_gate", False) and not getattr(experts, "has_post_expert_norm", False):
        joined = 8 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        expected = experts._apply_gate(joined)  # type: ignore[operator]
        halves = joined if experts.is_concatenated else torch.cat((joined[:, ::2], joined[:, 1::2]), dim=1)
        for activation in get_args(GateForm.__annotations__["activation"]):
            gate = GateForm(activation, float(getattr(experts, "limit", 0.0)))
            if torch.allclose(gate_mul(halves, gate), expected):
                return gate
    raise ValueError(f"{type(experts).__name__} computes a feed-forward that adaptree does not know")


def weights_of(module: nn.Module) -> dict[str, Weight | QuantisedStack]:
    """Collect all weights of a module and its children by name, including quantised ones."""
    found: dict[str, Weight | QuantisedStack] = dict(module.named_parameters())
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if isinstance(value, QuantisedWeight | QuantisedStack):
                found[f"{name}.{key}".removeprefix(".")] = value
    return found


def keeps_blocks(model: nn.Module) -> bool:
    """Whether all linear layers but routers and gates of shared experts, all embeddings and all experts are kept in
    quantised blocks."""
    dense = nn.Linear | nn.Embedding
    return not any(
        (isinstance(module, dense) and ".router." not in name and not name.endswith("shared_expert_gate"))
        or (is_experts(module) and not isinstance(module, QuantisedExperts))
        for name, module in model.named_modules()
    )


def matrix_of(module: nn.Module) -> Weight:
    """The weight of a linear layer or an embedding."""
    weight = weights_of(module)["weight"]
    assert not isinstance(weight, QuantisedStack), "only experts are stacked"
    return weight


def num_bytes(weight: Weight | QuantisedStack) -> int:
    """Size of a weight in memory, in bytes."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes


@torch.no_grad()
def replace_linears(model: nn.Module, table: Ops) -> int:
    """Replace every linear layer of `model` by a `PlannedLinear` and the experts of every layer by `PlannedExperts` of
    the ops in `table`; experts with a feed-forward that the op does not know stay. Returns the number of both. A tied
    embedding keeps its weight."""
    places = [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()]
    count = 0
    while places:
        parent, name, child = places.pop()  # holds the weights of one module twice at most
        with suppress(ValueError):
            if is_experts(child):
                planned: nn.Module = PlannedExperts(table.plan_experts(*expert_weights(child)))
            elif isinstance(child, QuantisedLinear) or type(child) is nn.Linear:
                planned = PlannedLinear(table.plan_linear(child.weight, child.bias))
            else:
                continue
            setattr(parent, name, planned)
            count += 1
    return count
