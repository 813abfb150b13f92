"""The start-up check of numerics confirms what is exact and notices what is not; its forwards are the engine's."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.tree import DraftTree
from kernels import ops
from kernels.linear import Product
from kernels.rows import ExtendRows
from kernels.tree_attention import Attention
from service.engine.numerics import Trial, check, rows_are_independent
from tests.service.engine.harness import tiny_target
from tests.service.engine.test_target import assert_close, stock_logits, tree_of
from tests.tiny_models import FAMILIES, VOCAB_SIZE, loaded_tiny

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_are_exact(family: str) -> None:
    target = tiny_target(loaded_tiny(family))
    assert check(target) == "exact"


def test_another_text_is_exact_too() -> None:
    target = tiny_target(loaded_tiny("llama"))
    for context in (20, 64, 128, 333):
        assert rows_are_independent(target, context=context, steps=10)


def test_attention_that_depends_on_company_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Company:
        """Attention whose last bits depend on how many rows are in the forward."""

        def __init__(self, plan: Attention) -> None:
            self._plan = plan

        def attend(self, query: Tensor, pool: Tensor, **how: Any) -> Tensor:
            return self._plan.attend(query, pool, **how) * (1 + 1e-6 * (query.shape[0] % 5))

    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_attention
    monkeypatch.setattr(table, "plan_attention", lambda *args, **sizes: Company(true_plan(*args, **sizes)))
    monkeypatch.setattr(table, "plan_layers", ops.REFERENCE.plan_layers)  # which asks any attention
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_products_that_depend_on_the_number_of_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_linear

    def plan(weight: Tensor, bias: Tensor | None) -> Product:
        product = true_plan(weight, bias)
        return lambda x: product(x) * (1.0 if x.shape[0] % 8 else 1 + 1e-6)

    monkeypatch.setattr(table, "plan_linear", plan)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_references_alone_are_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is compiled: libraries sum in other orders for other numbers of rows."""
    monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def trial_of(lines: int = 2) -> Trial:
    return Trial(tiny_target(loaded_tiny("llama"), num_slots=300), sequences=lines, max_length=100)


def test_a_text_read_and_continued_is_the_stock_models_text() -> None:
    trial = trial_of()
    tokens = trial.random_tokens(30)
    trial.prefill(1, tokens[:28], chunk=9)
    found = torch.stack([trial.decode(1, tokens[at], at) for at in (28, 29)])
    assert_close(found, stock_logits("llama", tokens)[28:])


def test_trees_of_different_sizes_stand_in_their_own_lines() -> None:
    trial = trial_of()
    first, second = trial.random_tokens(10), trial.random_tokens(21)
    trial.prefill(0, first[:-1], chunk=100)
    trial.prefill(1, second[:-1], chunk=4)
    tree = two_trees([7, 8], [9, 0])
    roots = [ExtendRows(0, 9, first[-1:], completes=True), ExtendRows(1, 20, second[-1:], completes=True)]
    logits = trial.verify(roots, tree)
    assert logits.shape == (2, 3, VOCAB_SIZE)
    assert_close(logits[0], stock_logits("llama", [*first, 7, 8])[-3:])
    assert_close(logits[1, :2], stock_logits("llama", [*second, 9])[-2:])
    assert not logits[1, 2].any()


def two_trees(first: list[int], second: list[int]) -> DraftTree:
    """A extend of two nodes, and one node with padding."""
    long, short = tree_of(first, [-1, 0]), tree_of(second, [-1, -1])
    return DraftTree.concatenated([long, short])._replace(num_nodes=torch.tensor([2, 1]))


def test_verifying_again_and_again_does_not_use_slots_up() -> None:
    trial = trial_of()
    trial.prefill(0, trial.random_tokens(40), chunk=40)
    root = ExtendRows(0, 40, [3], completes=True)
    first = trial.verify([root], tree_of([5, 6], [-1, -1]))
    for _ in range(300):
        again = trial.verify([root], tree_of([5, 6], [-1, -1]))
    assert torch.equal(again, first)


def test_random_tokens_are_repeatable_and_within_the_vocabulary() -> None:
    tokens = trial_of().random_tokens(200)
    assert tokens == trial_of().random_tokens(200)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
