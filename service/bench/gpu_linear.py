"""The linear layers of one model by themselves: our product, in which a row does not depend on its company, and the
library's, in which it may.

Each layer has several copies of weights, run one after the other: more than a device's cache holds, as in serving.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from kernels import ops
from kernels.linear import Product
from service.bench.gpu_clock import device_seconds
from service.bench.gpu_figures import Figure
from service.bench.gpu_plan import Plan
from service.engine.graphs import graphs_for
from service.engine.kv_pool import KVShape
from service.engine.weights import LoadedModel


@torch.inference_mode()
def linear_figures(loaded: LoadedModel, plan: Plan) -> Iterator[Figure]:
    """Both products of each kind of layer, by rows; a replay of all copies, divided by how many there are."""
    device, dtype = loaded.model.device, loaded.model.dtype
    plan_linear, graphs = ops.on(device).plan_linear, graphs_for(device)
    for name, (features, columns) in layers_of(loaded.model.config.get_text_config(), loaded.kv_shape).items():
        weights = _copies(features, columns, dtype, device, plan.copied_bytes)
        for rows in plan.rows:
            x = torch.randn(rows, columns, dtype=dtype, device=device)
            at: dict[str, int | float | str] = {
                "layer": name, "rows": rows, "features": features, "columns": columns,
            }  # fmt: skip
            contestants: dict[str, Sequence[Product]] = {
                "one order": [plan_linear(weight, None) for weight in weights],
                "library": [partial(linear, weight=weight) for weight in weights],
            }
            for which, products in contestants.items():
                replay = graphs.capture(partial(_run, products, x))
                seconds = device_seconds(replay, device, repeats=plan.repeats) / len(products)
                yield Figure("linear", which, seconds * 1e6, "us", at)


def layers_of(config: PreTrainedConfig, shape: KVShape) -> dict[str, tuple[int, int]]:
    """Features and columns of a decoder's joined layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * shape.head_dim, shape.kv_heads * shape.head_dim
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
