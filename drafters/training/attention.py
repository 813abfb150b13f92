"""Attention of whole texts side by side, which training and the reading of features share."""

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

_FOR_ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN's: it makes a plan for each shape, and each batch has another: 260 ms of a step of 300 on an H100."""


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Softmax attention; without `seen` ([batch or 1, rows, all rows] bool) each row sees itself and those before.
    # query [batch, heads, rows, dim], key and value [batch, kv_heads, all rows, dim] -> like query"""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)  # no kernel does with masks
    mask = None if seen is None else seen[:, None]
    with sdpa_kernel(_FOR_ANY_SHAPE):
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=seen is None, scale=scale)
