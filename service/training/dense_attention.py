"""Attention over whole texts side by side, for reading features: plain causal attention, no cache.

Models hand their own attention to this function through transformers' interface, as they do to the engine's. Products
of queries and keys are fp32 on CPUs, where bf16 attention is an order of magnitude slower.
Legend: batch, heads, length, dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from service.engine.target import refuse_unknown

ATTENTION_NAME = "adaptree_dense"


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attended: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """query [batch, heads, length, dim], key and value [batch, kv_heads, length, dim] -> [batch, length, heads, dim].

    `attended` collects the layers that came by. Raises StartupError for anything that would change the result unseen.
    """
    refuse_unknown(module, {**unused, "attention_mask": attention_mask}, "so its features cannot be read here")
    attended.append(module.layer_idx)  # type: ignore[arg-type]
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2]
    if softcap is None and (sliding_window is None or sliding_window >= length):
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = _masked(query * scale, key, value, causal_mask(length, sliding_window, query.device), softcap)
    return out.transpose(1, 2).to(dtype).contiguous(), None


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom: nobody ahead, and with a window only so many positions, the own one included.

    -> [length, length] bool
    """
    positions = torch.arange(length, device=device)
    behind = positions[:, None] - positions
    return (behind >= 0) & (behind < (window if window is not None else length))


def _masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, softcap: float | None) -> Tensor:
    """softmax(cap(q k)) v over what is seen. # seen [length, length]"""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, length, dim]
    scores = grouped @ key[:, :, None].transpose(3, 4)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    out: Tensor = weights @ value[:, :, None]
    return out.flatten(1, 2)


AttentionInterface.register(ATTENTION_NAME, dense_attention)
