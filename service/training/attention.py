"""Attention over whole sequences, with branches below their positions, for extracting features of a target.

Legend: batch, heads, length = rows of a sequence, dim.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from drafters.training.forward import attend
from service.engine.modules import refuse_unknown

ATTENTION_NAME = "adaptree_dense"


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attended: list[int],
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention interface asks. Raises StartupError for an option that would change the result
    and is not implemented.

    query [batch, heads, length, dim], key and value [batch, kv_heads, length, dim] -> [batch, length, heads, dim];
    `attended` collects the layers that were run; options: rows (None: plain sequences), scaling, sliding_window,
    softcap, dropout (ignored)
    """
    known = {name: options.pop(name, None) for name in ("rows", "scaling", "sliding_window", "softcap", "dropout")}
    refuse_unknown(module, {**options, "attention_mask": attention_mask}, "so its features cannot be read here")
    attended.append(module.layer_idx)  # type: ignore[arg-type]
    rows, scaling, sliding_window, softcap, _ = known.values()
    dtype = query.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    length = query.shape[2]
    if rows is None and softcap is None and (sliding_window is None or sliding_window >= length):
        out = attend(query, key, value, scale=scale)
    else:
        rows = rows or Rows.of_text(length, query.device)
        out = _masked(query * scale, key, value, rows.seen(sliding_window), softcap)
    return out.transpose(1, 2).to(dtype).contiguous(), None


class Rows(NamedTuple):
    """Sequences followed by branches: rows that continue one position of the sequence and attend to nothing after
    it."""

    positions: Tensor  # [batch or 1, rows] int64
    ends: Tensor  # [batch or 1, rows] int64, the last position of the sequence that a row attends to
    branches: int  # number of branch rows, at the end; each also attends to itself

    @staticmethod
    def of_text(length: int, device: torch.device) -> "Rows":
        """Rows of sequences without branches. # -> of shape [1, length]"""
        positions = torch.arange(length, device=device)[None]
        return Rows(positions, positions, 0)

    @staticmethod
    def branched(length: int, parents: Tensor) -> "Rows":
        """Rows of sequences of this length and of branches below `parents`. # parents [batch, branches] int64"""
        text = torch.arange(length, device=parents.device).expand(len(parents), -1)
        return Rows(torch.cat([text, parents + 1], dim=1), torch.cat([text, parents], dim=1), parents.shape[1])

    def seen(self, window: int | None) -> Tensor:
        """Which rows each row attends to; `window`: at most so many positions, its own included.
        # -> [batch or 1, rows, rows] bool"""
        count = self.positions.shape[1]
        row = torch.arange(count, device=self.positions.device)
        in_text = (row <= self.ends[:, :, None]) & (row < count - self.branches)
        near = self.positions[:, :, None] - self.positions[:, None] < (count if window is None else window)
        return (in_text & near) | (row[:, None] == row)


def _masked(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, softcap: float | None) -> Tensor:
    """softmax(cap(q k)) v over the rows that are attended to. # seen [batch or 1, length, length]"""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, length, dim]
    scores = grouped @ key[:, :, None].transpose(3, 4)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    out: Tensor = weights @ value[:, :, None]
    return out.flatten(1, 2)


AttentionInterface.register(ATTENTION_NAME, dense_attention)
