"""The start-up check of numerics: it confirms what is exact, and notices what is not."""

import pytest
import torch
from torch import Tensor

from kernels.tree_attention import AttentionPlan
from service.engine.numerics import ROW_MULTIPLES, rows_are_independent, settle
from tests.service.engine.harness import tiny_target
from tests.tiny_models import FAMILIES, loaded_tiny

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_exact(family: str) -> None:
    target = tiny_target(loaded_tiny(family))
    assert settle(target) == "exact"
    assert target.row_multiple in ROW_MULTIPLES
    assert rows_are_independent(target)


def test_another_text_is_exact_too_at_the_settled_multiple() -> None:
    target = tiny_target(loaded_tiny("llama"))
    settle(target)
    for context in (20, 64, 128, 333):
        assert rows_are_independent(target, context=context, steps=10)


@pytest.fixture
def company_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose last bits depend on how many rows are in the forward."""

    true_attend = AttentionPlan.attend

    def attend(
        plan: AttentionPlan,
        query: Tensor,
        pool: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        out = true_attend(plan, query, pool, scale=scale, window=window, softcap=softcap)
        return out * (1 + 1e-6 * (query.shape[0] % 5))

    monkeypatch.setattr(AttentionPlan, "attend", attend)


@pytest.mark.usefixtures("company_matters")
def test_attention_that_depends_on_company_is_noticed() -> None:
    target = tiny_target(loaded_tiny("llama"))
    assert settle(target) == "tolerant"
    assert target.row_multiple == 1


def test_products_that_depend_on_the_number_of_rows_need_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose result changes below eight rows: the smallest multiple that helps is eight."""
    loaded = loaded_tiny("llama")
    head = loaded.model.get_output_embeddings()
    plain = head.forward
    monkeypatch.setattr(head, "forward", lambda x: plain(x) * (1.0 if x.shape[1] % 8 == 0 else 1 + 1e-6))
    target = tiny_target(loaded)
    assert settle(target) == "exact"
    assert target.row_multiple == 8
