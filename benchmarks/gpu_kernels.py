"""`python -m benchmarks gpu-attention` and `gpu-linear`: single layers of large models against other kernels."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedConfig

from benchmarks.checkpoint import dummy_config
from benchmarks.gpu import check_device, figures_table, forget
from benchmarks.gpu_sections import DRY, FULL, At, Figure, Plan, device_seconds
from kernels import ops
from kernels.graph_runner import capture_for
from kernels.layers import Product
from kernels.rows import ExtendRows, ForwardRows
from kernels.tree_attention import AttentionForm
from service.assembly import device_of
from service.bench.commands import Out
from service.conditions import refuse_unwritable, surroundings, write_report
from service.config import LoadedConfig
from service.engine.kv_pool import LayerKV, SlotPool, SlotTable
from service.engine.measuring import Point, trees_for
from service.engine.rows import RowLayout

_MODELS = ("llama-3.1-8b", "qwen3-8b")
_NODES = 31  # 32 rows of each sequence with the root
_HEADS = 32


@dataclass(frozen=True, slots=True)
class _Layer:
    """Rows of some sequences, one layer's keys and values, and queries of all rows."""

    rows: ForwardRows
    table: SlotTable
    pool: Tensor  # [2, slots, kv_heads, head_dim]
    queries: Tensor  # [rows, heads, head_dim] float32
    batch: int
    context: int


def attention_figures(device: torch.device, model: PreTrainedConfig, plan: Plan) -> Iterator[Figure]:
    """Yield times of our attention kernel and others over batches and contexts."""
    shape = _kv_of(model)
    swept = torch.empty(plan.copied_bytes, dtype=torch.uint8, device=device)
    for batch in (1, 8) if plan.for_real else (2,):
        for context in plan.contexts:
            layer = _layer(device, shape, batch, context)
            at: At = {"batch": batch, "context": context, "rows": layer.rows.num_rows}
            for name, run in _contestants(layer, device):
                seconds = device_seconds(run, device, repeats=plan.repeats, before=swept.zero_)
                yield Figure("attention", name, seconds * 1e3, "ms", at)


def _contestants(layer: _Layer, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    yield "tree attention", _ours(layer, device)
    query, key, value, mask = _gathered(layer)
    yield "SDPA with a mask", partial(scaled_dot_product_attention, query, key, value, attn_mask=mask, enable_gqa=True)
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    # fused kernels take a mask or grouped heads, but not both
    yield "SDPA with a mask, heads repeated", partial(scaled_dot_product_attention, query, keys, values, attn_mask=mask)
    if device.type == "cuda":
        yield "flex attention", _flex(query, key, value, mask)


@torch.inference_mode()
def _ours(layer: _Layer, device: torch.device) -> Callable[[], object]:
    heads, head_dim = layer.pool.shape[2:]
    planned = ops.on(device).plan_attention(
        layer.rows.attention,
        layer.table.slots,
        query_heads=layer.queries.shape[1],
        kv_heads=heads,
    )
    return partial(planned.attend, layer.queries, layer.pool, AttentionForm(head_dim**-0.5))


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return mask[batch, 0, row, column]

    blocks = create_block_mask(seen, query.shape[0], None, query.shape[2], key.shape[2], device=str(query.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return partial(compiled, query, key, value, block_mask=blocks, enable_gqa=True)


def _layer(device: torch.device, shape: LayerKV, batch: int, context: int) -> _Layer:
    slots = SlotPool(batch * (context + 2 + _NODES) + 1, device)
    table = SlotTable(batch, context + 2 + _NODES, device)
    everything = slots.allocate(slots.num_free)
    order = torch.randperm(everything.shape[0], generator=torch.Generator().manual_seed(0))
    slots.free(everything[order.to(device)])
    for line in range(batch):
        table.slots[line, :context] = slots.allocate(context)
    extends = [ExtendRows(line, context, [0], completes=True) for line in range(batch)]
    rows = RowLayout(slots, table)(extends, trees_for(Point(batch, context, batch * (1 + _NODES)), device))
    generator = torch.Generator(device).manual_seed(0)
    pool = torch.randn(2, slots.capacity + 1, shape.kv_heads, shape.dim, generator=generator, device=device)
    heads = max(shape.kv_heads, _HEADS // shape.kv_heads * shape.kv_heads)
    queries = torch.randn(rows.num_rows, heads, shape.dim, generator=generator, device=device)
    return _Layer(rows, table, pool.to(_dtype_on(device)), queries, batch, context)


def _gathered(layer: _Layer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys, values [batch, heads, rows, head_dim] in the pool's type, and the mask [batch, 1, rows,
    context + 1 + nodes] bool."""
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


@torch.inference_mode()
def linear_figures(device: torch.device, model: PreTrainedConfig, plan: Plan) -> Iterator[Figure]:
    """Yield times of our linear layers and the library's by rows: of a replay of several copies, over their number."""
    shape = _kv_of(model)
    plan_linear, capture = ops.on(device).plan_linear, capture_for(device)
    for name, (features, columns) in layers_of(model, shape).items():
        weights = _copies(features, columns, _dtype_on(device), device, plan.copied_bytes)
        for rows in plan.rows:
            x = torch.randn(rows, columns, dtype=_dtype_on(device), device=device)
            at: At = {"layer": name, "rows": rows, "features": features, "columns": columns}
            contestants: dict[str, Sequence[Product]] = {
                "one order": [plan_linear(weight, None) for weight in weights],
                "library": [partial(linear, weight=weight) for weight in weights],
            }
            for which, products in contestants.items():
                repeat = capture(partial(_run, products, x))
                seconds = device_seconds(repeat, device, repeats=plan.repeats) / len(products)
                yield Figure("linear", which, seconds * 1e6, "us", at)


def layers_of(config: PreTrainedConfig, shape: LayerKV) -> dict[str, tuple[int, int]]:
    """Return features and columns of a decoder's joined linear layers by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * shape.dim, shape.kv_heads * shape.dim
    return {
        "q, k, v": (queries + 2 * keys, hidden),
        "o": (hidden, queries),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config.vocab_size, hidden),
    }


def _copies(features: int, columns: int, dtype: torch.dtype, device: torch.device, most_bytes: int) -> Sequence[Tensor]:
    count = max(1, min(4, most_bytes // (features * columns * dtype.itemsize)))
    return [torch.randn(features, columns, dtype=dtype, device=device) / columns**0.5 for _ in range(count)]


def _run(products: Sequence[Product], x: Tensor) -> None:
    for product in products:
        product(x)


_DryRun = Annotated[bool, typer.Option("--dry-run", help="Run on a CPU with tiny shapes; the figures mean nothing.")]


def run_attention(loaded: LoadedConfig, dry_run: _DryRun = False, out: Out = None) -> bool:
    """Time the attention of one layer: our kernel on scattered slots, SDPA and flex attention on gathered keys."""
    return _report(loaded, out, dry_run, attention_figures)


def run_linear(loaded: LoadedConfig, dry_run: _DryRun = False, out: Out = None) -> bool:
    """Time the linear layers of large models: our product, with one order of summation per row, and the library's."""
    return _report(loaded, out, dry_run, linear_figures)


def _kv_of(model: PreTrainedConfig) -> LayerKV:
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return LayerKV(model.num_key_value_heads, head_dim)


def _dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _report(
    loaded: LoadedConfig,
    out: Path | None,
    dry_run: bool,
    measure: Callable[[torch.device, PreTrainedConfig, Plan], Iterator[Figure]],
) -> bool:
    """Measure the layers of every large model in turn."""
    refuse_unwritable(out)
    plan = DRY if dry_run else FULL
    check_device(loaded.config, plan, torch.cuda.device_count())
    device = torch.device("cpu") if dry_run else device_of(loaded.config.device)
    figures: list[Figure] = []
    for name in ("tiny",) if dry_run else _MODELS:
        found = measure(device, dummy_config(name), plan)
        figures += [replace(figure, at={"model": name, **figure.at}, costs_only=True) for figure in found]
        forget()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    Console().print(figures_table(figures))
    write_report(out, {**surroundings(), "device": name}, figures, {"dry_run": dry_run})
    return True
