"""Attention of training and of reading features, against softmax written out."""

import math

import pytest
import torch
from torch.backends.cuda import cudnn_sdp_enabled

from drafters.training import forward
from drafters.training.forward import attend

_HEADS, _KV_HEADS, _ROWS, _DIM = 6, 2, 9, 16


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    lines = []
    for head in range(_HEADS):
        kv_head = head // (_HEADS // _KV_HEADS)
        scores = (query[:, head] @ key[:, kv_head].transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        lines.append(scores.softmax(-1) @ value[:, kv_head])
    return torch.stack(lines, dim=1)


@pytest.mark.parametrize("before", [0, 5])
def test_rows_see_what_a_mask_says(before: int) -> None:
    query = _drawn(2, _HEADS, _ROWS, _DIM)
    key, value = (_drawn(2, _KV_HEADS, _ROWS + before, _DIM) + shift for shift in (0.0, 1.0))
    seen = (_drawn(2, _ROWS, _ROWS + before) > 0).index_fill(2, torch.tensor([0]), True)
    wanted = _written_out(query, key, value, seen, _DIM**-0.5)
    torch.testing.assert_close(attend(query, key, value, seen), wanted)


def test_without_a_mask_they_see_what_is_before_them() -> None:
    query, key, value = (_drawn(2, heads, _ROWS, _DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    seen = torch.ones(2, _ROWS, _ROWS, dtype=torch.bool).tril()
    wanted = _written_out(query, key, value, seen, 0.3)
    torch.testing.assert_close(attend(query, key, value, scale=0.3), wanted)


def test_on_a_cpu_autocast_does_not_round_them() -> None:
    query, key, value = (_drawn(2, heads, _ROWS, _DIM) for heads in (_HEADS, _KV_HEADS, _KV_HEADS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(query, key, value)
    assert torch.equal(found, attend(query, key, value))


def test_no_kernel_is_asked_that_plans_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def record(*_: object, **__: object) -> torch.Tensor:
        asked.append(cudnn_sdp_enabled())
        return torch.zeros(())

    monkeypatch.setattr(forward, "scaled_dot_product_attention", record)
    rows = _drawn(1, _HEADS, _ROWS, _DIM)
    attend(rows, rows, rows)
    assert asked == [False]
    assert cudnn_sdp_enabled()
