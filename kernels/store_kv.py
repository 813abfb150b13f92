"""Keys and values of a forward's rows into one layer of a pool that is addressed by places.

Legend: places = slots of a layer's keys, then of its values.
"""

import torch
from torch import Tensor


def store_kv(pool: Tensor, places: Tensor, keys: Tensor, values: Tensor) -> None:
    """pool [places, kv_heads, dim]; places [2, rows] int64, where keys and where values go; keys, values [rows,
    kv_heads, dim] in any layout, rounded to the pool's type"""
    pool.index_copy_(0, places.view(-1), torch.cat([keys, values]).to(pool.dtype))
