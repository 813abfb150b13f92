"""Runs the target's layers: by our own ops if a trial shows that they compute the same as the model's modules,
otherwise by the modules.

Legend: rows = tokens of one forward, hidden = the model's width, dim = head_dim, taps = number of tapped layers.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.tree import DraftTree
from kernels.decoder_layer import DecoderLayer, RotaryTable, RowPlaces
from kernels.families import spec_of
from kernels.layers import QuantisedWeight, RunLayers, Weight, look_up
from kernels.ops import REFERENCE, Ops
from kernels.recurrence import StateRows
from kernels.rows import ExtendRows
from kernels.specs import ModelSpec, QueryScaling
from kernels.tree_attention import KVRows
from service.engine.kv_pool import KVPool, Plan
from service.engine.modules import (
    LayerForms,
    ModuleLayers,
    decoder_layers,
    last_norm,
    layer_weights,
    matrix_of,
    replace_linears,
    weights_of,
)
from service.engine.peers import Peers
from service.engine.shards import ModelShard
from service.errors import StartupError

_TRIAL_ROWS = 9  # number of random tokens on which modules and ops are compared

logger = logging.getLogger(__name__)

LogitRows = Tensor | slice
Groups = tuple[KVRows, ...]
Layers = Callable[[Tensor, Tensor, Groups, LogitRows, KVPool, bool, StateRows | None], tuple[Tensor, Tensor | None]]
"""Runs a forward: tokens [rows], positions [rows], keys and values by KV group, rows that get logits, pool, whether
features are wanted, rows and states of recurrent layers -> logits [logits, vocab], and the outputs of tapped layers
[rows, taps * hidden] in their order, or None without taps or if they are not wanted."""


class FusedDecoder:
    """Runs a whole model by ops over flat rows, with the model's own embedding, rotary tables, norm and head."""

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        ops: Ops,
        device: torch.device,
        taps: Sequence[int] = (),
    ) -> None:
        inner, head = model.get_decoder(), model.get_output_embeddings()
        self._embedding: Weight = inner.get_input_embeddings().weight
        # transformers rounds it to the type of the embedding
        scale = torch.tensor(spec.embedding_scale, dtype=self._embedding.dtype)
        self._scale = scale.item()  # planned transfer: at start
        self._rotary = _rotary_tables(model, spec, self._embedding.dtype, device)
        self._per_layer = _PerLayerEmbedding(inner, spec, ops) if spec.per_layer_width else None
        self._spec, self._layers, self._ops = spec, layers, ops
        self._norm = last_norm(model).get_parameter("weight")
        self._head = self._ops.plan_linear(head.weight, head.bias)
        self._taps, self._tapped = tuple(taps), [*dict.fromkeys(taps)]  # in a small model some coincide
        self._planned: tuple[Sequence[Any] | None, RunLayers | None] = None, None  # storage of a pool, its layers

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        groups: Groups,
        logit_rows: LogitRows,
        pool: KVPool,
        features: bool = True,
        states: StateRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run a forward; see `Layers`."""
        hidden, tapped = self.embedded(tokens), None
        places = self.places(tokens, hidden, positions, groups, states)
        if features and self._taps:
            tapped = hidden.new_empty(hidden.shape[0], len(self._tapped) * hidden.shape[1])
        delta = self._run_of(pool)(hidden, None, places, tapped)
        if tapped is not None and len(self._tapped) < len(self._taps):
            columns = dict(zip(self._tapped, tapped.chunk(len(self._tapped), -1), strict=True))
            tapped = torch.cat([columns[tap] for tap in self._taps], -1)
        return self.logits(hidden, delta, logit_rows), tapped

    def _run_of(self, pool: KVPool) -> RunLayers:
        """Return the layers planned for this pool; the plan is kept until the pool changes."""
        storage, run = self._planned
        if run is None or storage is not pool.layers:
            run = self._ops.plan_layers(self._layers, pool.layers, self._tapped)
            self._planned = pool.layers, run
        return run

    def embedded(self, tokens: Tensor) -> Tensor:
        """Look up the embeddings of tokens. # [rows] int64 -> [rows, hidden]"""
        found = look_up(tokens, self._embedding)
        return found if self._scale == 1 else found * self._scale

    def places(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, groups: Groups, states: StateRows | None = None
    ) -> RowPlaces:
        """Collect what all layers read of a forward's rows. # tokens, positions [rows] int64, hidden [rows, hidden]"""
        per_layer = None if self._per_layer is None else self._per_layer(tokens, hidden)
        return RowPlaces({name: table(positions) for name, table in self._rotary.items()}, groups, per_layer, states)

    def logits(self, hidden: Tensor, delta: Tensor | None, rows: LogitRows) -> Tensor:
        """Compute the logits of `rows`, of all if that is a slice; the last layer's output is `hidden` + `delta`.
        # hidden, delta [rows, hidden] -> [logits, vocab]"""
        how = self._spec.epsilon, self._spec.layers[-1].norm_offset
        states = self._ops.add_rms_norm(hidden, delta, self._norm, *how)
        logits = self._head(states if isinstance(rows, slice) else states[rows])
        if self._spec.logit_divisor != 1:
            logits = logits / self._spec.logit_divisor
        cap = self._spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class SharedDecoder(FusedDecoder):
    """Runs one device's part of a model. The first device looks up embeddings for all, and gets the logits of all."""

    def __init__(self, model: PreTrainedModel, part: ModelShard, peers: Peers, ops: Ops, taps: Sequence[int]) -> None:
        """Plan the layers; the model's own modules can run no longer."""
        layers = _planned(model, part.own_spec, ops.shared_by(peers))
        super().__init__(model, part.spec, layers, ops, model.device, taps)
        model.set_output_embeddings(nn.Identity())
        self._peers, self._vocab = peers, part.vocab_size
        self._width, self._dtype = model.config.hidden_size, model.dtype

    def embedded(self, tokens: Tensor) -> Tensor:  # [rows] int64 -> [rows, hidden]
        if self._peers.shard.rank == 0:
            return self._peers.shared(super().embedded(tokens))
        return self._peers.shared(torch.empty(len(tokens), self._width, dtype=self._dtype, device=tokens.device))

    def logits(self, hidden: Tensor, delta: Tensor | None, rows: LogitRows) -> Tensor:  # -> [logits, vocab]
        return self._peers.joined(super().logits(hidden, delta, rows), self._vocab)


class _PerLayerEmbedding:
    """Embeddings of tokens for each layer: (norm(projection(h) / sqrt(hidden)) + sqrt(width) e) / sqrt(2) (Gemma 4)."""

    def __init__(self, inner: nn.Module, spec: ModelSpec, ops: Ops) -> None:
        """`inner`: the model's decoder."""
        self._table = matrix_of(inner.get_submodule("embed_tokens_per_layer"))
        projection = matrix_of(inner.get_submodule("per_layer_model_projection"))
        self._projection = ops.plan_linear(projection, None)
        self._norm = inner.get_submodule("per_layer_projection_norm").get_parameter("weight")
        self._spec, self._ops, self._width = spec, ops, spec.per_layer_width
        # transformers rounds it to the type of the embedding
        self._scale = torch.tensor(self._width**0.5, dtype=self._table.dtype).item()  # planned transfer: at start

    def __call__(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """# tokens [rows] int64, hidden [rows, hidden] -> [layers, rows, width]"""
        sizes, how = (len(self._spec.layers), self._width), (self._spec.epsilon, self._spec.layers[-1].norm_offset)
        projected = (self._projection(hidden) * hidden.shape[-1] ** -0.5).view(-1, self._width)
        context = self._ops.add_rms_norm(projected, None, self._norm, *how).unflatten(0, (-1, sizes[0]))
        own = (look_up(tokens, self._table) * self._scale).unflatten(-1, sizes)
        summed: Tensor = (context + own) * 2**-0.5
        return summed.transpose(0, 1).contiguous()


def _rotary_tables(
    model: PreTrainedModel, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> dict[str, RotaryTable]:
    """Build the table of each rotary embedding of the model, by the names of `AttentionSpec.rope`."""
    rotary, text = getattr(model.get_decoder(), "rotary_emb", None), model.config.get_text_config()
    attention = {own.rope: own for own in spec.attending if own.rope is not None}

    def table(name: str) -> RotaryTable:
        def embed(positions: Tensor) -> tuple[Tensor, Tensor]:
            # Model families return cos and sin in the type of the first argument or in float32, of one half or of both.
            assert rotary is not None, "the model rotates"
            found = rotary(positions.to(dtype), positions[None], *([name] if name else []))
            cos, sin = (one[0].to(dtype) for one in found)
            return (cos, sin) if halves == 1 else (torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))

        halves = 2 if spec.halved_angles else 1
        scaling = attention[name].query_scaling
        return RotaryTable(embed, text.max_position_embeddings, device, scaling and partial(_query_scale, scaling))

    return {name: table(name) for name in attention}


def _query_scale(scaling: QueryScaling, positions: Tensor) -> Tensor:
    """Compute the factor on queries at these positions. # [positions] int64 -> [positions]"""
    return 1 + scaling.beta * torch.log1p(torch.floor(positions / scaling.length))


@torch.no_grad()
def layers_of(model: PreTrainedModel, pool: KVPool, ops: Ops, tap_layers: Sequence[int]) -> Layers:
    """Build the runner of a model's layers: our ops if they compute the same as its modules, otherwise the modules with
    linear layers replaced by planned ones. The model's weights move into the runner.

    The comparison writes to the pool. Raises StartupError for a model that cannot run, or if the device's ops compute
    something else than plain torch."""
    trial, device = _Trial.of(model, pool, REFERENCE), pool.device
    recorded, stack = _recorded(model, trial), decoder_layers(model)
    try:
        spec = spec_of(model.config.get_text_config().to_dict())
        agree = partial(_agree, epsilon=_epsilon(model), routed=any(layer.feed_forward.router for layer in spec.layers))
        _refuse_other_options(spec, recorded.forms)
        # The reference in plain torch needs no second copy of all weights.
        pairs = zip(map(layer_weights, stack), spec.layers, strict=True)
        layers = (DecoderLayer.of(weights, REFERENCE, own, epsilon=spec.epsilon) for weights, own in pairs)
        _refuse_difference(FusedDecoder(model, spec, (), REFERENCE, device), layers, trial, recorded, agree)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # other modules, options, widths
        if trial.states is not None:
            raise StartupError(f"{error}; a model with recurrent layers runs by ops only, so it cannot run") from error
        count = replace_linears(model, ops)
        logger.info("%s, so the model runs by its own modules, with %d linear layers by kernels", error, count)
        return ModuleLayers(model, tap_layers)
    planned = _planned(model, spec, ops)
    decoder = FusedDecoder(model, spec, planned, ops, device, tap_layers)
    model.set_output_embeddings(nn.Identity())
    try:
        _refuse_difference(decoder, planned, _Trial.of(model, pool, ops), recorded, agree)
    except NotImplementedError as error:
        raise StartupError(f"this device's kernels do not support {error}: set device to another") from error
    except ValueError as error:
        raise StartupError(
            f"by this device's kernels {error}, but not by plain torch: run `make install` again"
        ) from error
    return decoder


def _planned(model: PreTrainedModel, spec: ModelSpec, ops: Ops) -> list[DecoderLayer]:
    """Plan all layers, and take their weights from the model one by one, so that few are in memory twice."""
    planned, stack = list[DecoderLayer](), decoder_layers(model)
    for own in spec.layers:
        planned.append(DecoderLayer.of(layer_weights(stack[0]), ops, own, epsilon=spec.epsilon))
        del stack[0]
    return planned


class _Trial(NamedTuple):
    """Arguments of `Layers` for a prompt of random tokens."""

    tokens: Tensor
    positions: Tensor
    groups: Groups
    logit_rows: slice
    pool: KVPool
    states: StateRows | None  # of recurrent layers, which begin with the null state

    @staticmethod
    def of(model: PreTrainedModel, pool: KVPool, ops: Ops) -> "_Trial":
        count, device = min(_TRIAL_ROWS, pool.num_slots - 1), pool.device
        text = model.config.get_text_config()
        tokens = torch.randint(text.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
        slots = torch.arange(1, count + 1, device=device)
        table, tree = pool.table(1, count), DraftTree.empty(1, device)
        extends = [ExtendRows(0, 0, tokens.tolist(), completes=True)]  # planned transfer: before serving
        rows = ops.lay_out_rows(extends, [0], tree, slots, table.slots, _no_nodes_to_place)
        groups = pool.groups(rows.attention, slots, slots[None], planner_of(ops, text.num_attention_heads))
        begun = None if table.states is None else table.states.rows(extends, [0], tree.parents)
        return _Trial(rows.tokens, rows.attention.positions, groups, slice(None), pool, begun)


def planner_of(table: Ops, query_heads: int) -> Plan:
    """Return the function that plans attention by the ops in `table`."""
    return lambda rows, slots, heads: table.plan_attention(rows, slots, query_heads=query_heads, kv_heads=heads)


def _no_nodes_to_place(rows: tuple[Tensor, ...]) -> NoReturn:
    raise AssertionError("there are no trees")


class _Call(NamedTuple):
    """Input and output of one layer."""

    hidden: Tensor  # [rows, hidden], like output
    output: Tensor


class _Recorded(NamedTuple):
    """What a model's modules computed."""

    forms: LayerForms
    calls: Sequence[_Call]  # of the layers
    logits: Tensor  # [rows, vocab]


def _recorded(model: PreTrainedModel, trial: _Trial) -> _Recorded:
    """Run the model's modules on the trial."""
    calls = list[_Call]()

    def record(layer: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        whole = output if isinstance(output, Tensor) else output[0]
        calls.append(_Call(args[0][0].clone(), whole[0].clone()))

    hooks = [layer.register_forward_hook(record) for layer in decoder_layers(model)]
    modules = ModuleLayers(model)
    logits, _ = modules(*trial[:-1])
    for hook in hooks:
        hook.remove()
    return _Recorded(modules.forms, calls, logits)


def _refuse_other_options(spec: ModelSpec, forms: LayerForms) -> None:
    """Raise ValueError if a layer calls attention with other options than its record says."""
    for (index, form), own in zip(forms, spec.attending, strict=True):
        if (*form[:3], form.sinks is not None) != (own.scale, own.window, own.softcap, own.sinks):
            raise ValueError(f"layer {index} calls attention with other options")


def _refuse_difference(
    decoder: FusedDecoder,
    layers: Iterable[DecoderLayer],
    trial: _Trial,
    recorded: _Recorded,
    agree: Callable[[Tensor, Tensor, Tensor], bool],
) -> None:
    """Raise ValueError, with words for the log, at the first difference between ops and the model's modules. Each layer
    gets what its module got."""
    calls, logits = recorded.calls, recorded.logits
    places = decoder.places(trial.tokens, calls[0].hidden, trial.positions, trial.groups, trial.states)
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        hidden = call.hidden.clone()
        delta = layer(hidden, None, places, trial.pool.layer(index))
        if not agree(hidden + delta, call.output, call.output - call.hidden):
            raise ValueError(f"layer {index} is not a standard layer")
    if not torch.equal(decoder.embedded(trial.tokens), calls[0].hidden):
        raise ValueError("the embedding is not a plain table")
    if not agree(decoder.logits(calls[-1].output.clone(), None, trial.logit_rows), logits, logits):
        raise ValueError("the last layer is followed by more than a norm and a head")


def _epsilon(model: PreTrainedModel) -> float:
    """Relative rounding error of the model's products: the epsilon of its dtype, or with quantised weights bfloat16's,
    because such products round their input to 8 bits."""
    quantised = any(isinstance(weight, QuantisedWeight) for weight in weights_of(model).values())
    return torch.finfo(torch.bfloat16 if quantised else model.dtype).eps


def _agree(found: Tensor, expected: Tensor, added: Tensor, *, epsilon: float, routed: bool) -> bool:
    """Whether `found` and `expected` differ by no more than half of the digits of `added`, the part of `expected` that
    the layer contributed, and the rounding of the sum. With `routed`, most rows must, as a rounding may choose other
    experts for one. # all [rows, hidden]"""

    def size(x: Tensor) -> Tensor:
        by_row: Tensor = x.float().norm(dim=-1)
        return by_row.median() if routed else by_row.norm()

    allowed = epsilon**0.5 * size(added) + 2 * epsilon * size(expected)
    return bool(size(found.float() - expected.float()) <= allowed)
