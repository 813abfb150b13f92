"""The attention of one layer by itself: our kernel on scattered slots, and what else there is on gathered keys.

Peers get keys and values in their own layout for free, which in serving they would have to be copied into. Caches are
swept before each run: in serving a step's weights have passed through them since the layer was last attended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import ops
from kernels.exact_rows import exact_row_multiple
from kernels.tree_attention import WIDTH
from service.bench.gpu_clock import device_seconds
from service.bench.gpu_figures import Figure
from service.bench.gpu_plan import Plan
from service.engine.commit import lay_out
from service.engine.costs.measuring import Point, trees_for
from service.engine.kv_pool import KVShape
from service.engine.rows import ExtendRows, ForwardRows
from service.engine.slots import SlotPool, SlotTable

_NODES = 31  # beside the root: 32 rows of each sequence
_HEADS = 32


@dataclass(frozen=True, slots=True)
class _Layer:
    """Rows of some sequences, one layer's pool, and queries of all rows."""

    rows: ForwardRows
    table: SlotTable
    pool: Tensor  # [2, slots, kv_heads, head_dim]
    queries: Tensor  # [rows, heads, head_dim] float32
    batch: int
    context: int


def attention_figures(device: torch.device, shape: KVShape, plan: Plan) -> Iterator[Figure]:
    """Our kernel and its peers over batches and contexts, for keys and values of this shape."""
    swept = torch.empty(plan.copied_bytes, dtype=torch.uint8, device=device)
    for batch in plan.kernel_batches:
        for context in plan.contexts:
            layer = _layer(device, shape, batch, context)
            at: dict[str, int | float | str] = {"batch": batch, "context": context, "rows": layer.rows.num_rows}
            for name, run in _contestants(layer, device):
                seconds = device_seconds(run, device, repeats=plan.repeats, before=swept.zero_)
                yield Figure("attention", name, seconds * 1e3, "ms", at)


def _contestants(layer: _Layer, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "tree attention", _ours(layer, device)
    query, key, value, mask = _gathered(layer)
    yield "SDPA with a mask", partial(scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=True)
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    # fused forms take a mask or grouped heads, but not both
    yield "SDPA with a mask, heads repeated", partial(scaled_dot_product_attention, query, keys, values, attn_mask=mask)
    if device.type == "cuda":
        yield "flex attention", _flex(query, key, value, mask)


@torch.inference_mode()
def _ours(layer: _Layer, device: torch.device) -> Callable[[], object]:
    heads, head_dim = layer.pool.shape[2:]
    planned = ops.on(device).plan_attention(
        layer.rows.attention,
        layer.table.slots,
        num_slots=layer.pool.shape[1],
        query_heads=layer.queries.shape[1],
        kv_heads=heads,
        member_multiple=exact_row_multiple(WIDTH, head_dim, device),
    )
    return partial(planned.attend, layer.queries, layer.pool, scale=head_dim**-0.5)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask[batch, 0, row, column]

    blocks = create_block_mask(seen, query.shape[0], None, query.shape[2], key.shape[2], device=str(query.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, query, key, value, block_mask=blocks, enable_gqa=True)


def _layer(device: torch.device, shape: KVShape, batch: int, context: int) -> _Layer:
    slots = SlotPool(batch * (context + 2 + _NODES) + 1, device)
    table = SlotTable(batch, context + 2 + _NODES, device)
    everything = slots.allocate(slots.num_free)
    order = torch.randperm(everything.shape[0], generator=torch.Generator().manual_seed(0))
    slots.free(everything[order.to(device)])
    for line in range(batch):
        table.slots[line, :context] = slots.allocate(context)
    extends = [ExtendRows(line, context, [0], completes=True) for line in range(batch)]
    rows = lay_out(extends, trees_for(Point(batch, context, batch * (1 + _NODES)), device), slots, table)
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.randn(2, slots.capacity + 1, shape.kv_heads, shape.head_dim, generator=generator, device=device)
    heads = max(shape.kv_heads, _HEADS // shape.kv_heads * shape.kv_heads)
    queries = torch.randn(rows.num_rows, heads, shape.head_dim, generator=generator, device=device)
    return _Layer(rows, table, pool.to(shape.dtype), queries, batch, context)


def _gathered(layer: _Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values as [batch, heads, rows, head_dim] in the pool's type, and who sees whom."""
    attention, batch, each = layer.rows.attention, layer.batch, 1 + _NODES
    prefix = layer.table.slots[:batch, : layer.context + 1]
    slots = torch.cat([prefix, attention.node_slots[:, :_NODES]], dim=1)  # [batch, context + 1 + nodes]
    keys, values = layer.pool[:, slots].transpose(2, 3)
    roots, nodes = layer.queries[:batch, None], layer.queries[batch:].unflatten(0, (batch, _NODES))
    queries = torch.cat([roots, nodes], dim=1).transpose(1, 2).to(layer.pool.dtype)
    mask = torch.zeros(batch, 1, each, slots.shape[1], dtype=torch.bool, device=slots.device)
    mask[..., : layer.context + 1] = True
    mask[:, 0, 1:, layer.context + 1 :] = attention.ancestors[:, :_NODES, :_NODES]
    return queries.contiguous(), keys.contiguous(), values.contiguous(), mask
