"""The target against transformers' own forward: logits, tapped features, chunks, company and trees, per family."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from drafters.tree import DraftTree
from kernels import ops
from kernels.layers import Product
from kernels.rows import ExtendRows
from kernels.tree_attention import NULL_SLOT, Attention, AttentionForm
from service.engine.kv_pool import KVPool, SlotPool, SlotTable
from service.engine.measuring import check
from service.engine.modules import AttentionStep, decoder_layers, replace_linears, slot_attention
from service.engine.rows import RowLayout
from service.engine.target import Target
from service.errors import StartupError
from tests.service.engine.harness import keys_and_values, tiny_target
from tests.tiny_models import (
    EOS_ID,
    FAMILIES,
    VOCAB_SIZE,
    load,
    loaded_tiny,
    random_prompts,
    save_model,
    stock,
    stock_tiny,
)

TOLERANCE = 1e-4
LENGTH = 150  # several sliding windows


class Texts:
    """A target's table and slots; runs extends and trees and gives every row's logits."""

    def __init__(self, target: Target, lines: int = 3) -> None:
        self.target = target
        self.slots = SlotPool(target.pool.num_slots, target.device)
        self.table = SlotTable(lines, LENGTH + 20, target.device)
        self.layout = RowLayout(self.slots, self.table)

    def extend(self, line: int, tokens: Sequence[int], chunk: int) -> Tensor:
        """Logits after the last token of each chunk. # -> [chunks, vocab]"""
        starts = range(0, len(tokens), chunk)
        return torch.cat([self.run([ExtendRows(line, at, tokens[at : at + chunk], completes=True)]) for at in starts])

    def run(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> Tensor:
        rows = self.layout(extends, tree or DraftTree.empty(len(extends)))
        return self.target.forward(rows, self.table).logits


def prompt(seed: int = 0, length: int = LENGTH) -> list[int]:
    return next(random_prompts(1, length, seed=seed))


@torch.inference_mode()
def stock_logits(family: str, tokens: Sequence[int]) -> Tensor:
    """Logits after every token. # -> [tokens, vocab]"""
    logits: Tensor = stock_tiny(family)(torch.tensor([tokens])).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, chunk: int) -> None:
    tokens = prompt()
    found = Texts(tiny_target(loaded_tiny(family))).extend(0, tokens, chunk)
    ends = [min(at + chunk, LENGTH) - 1 for at in range(0, LENGTH, chunk)]
    assert_close(found, stock_logits(family, tokens)[ends])


@pytest.mark.parametrize("family", FAMILIES)
def test_several_sequences_in_one_forward(family: str) -> None:
    texts = Texts(tiny_target(loaded_tiny(family)))
    tokens = [prompt(seed, length) for seed, length in ((1, 90), (2, 1), (3, 33))]
    found = texts.run([ExtendRows(line, 0, text, completes=True) for line, text in enumerate(tokens)])
    assert_close(found, torch.stack([stock_logits(family, text)[-1] for text in tokens]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_path_of_a_tree_is_a_text_of_its_own(family: str) -> None:
    texts = Texts(tiny_target(loaded_tiny(family)))
    text = prompt(5, 100)
    texts.extend(0, text[:-1], 40)
    parents = [-1, 0, -1, 1, 2, 2, 3]
    tokens = prompt(6, len(parents))
    found = texts.run([ExtendRows(0, 99, text[-1:], completes=True)], tree_of(tokens, parents))
    for node in range(len(parents)):
        path = [tokens[at] for at in path_to(node, parents)]
        assert_close(found[1 + node], stock_logits(family, text + path)[-1])


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree.of(torch.tensor([tokens]), torch.tensor([parents]))


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_tapped_features_are_layer_outputs(family: str, tmp_path: Path) -> None:
    taps = (2, 1, 0)
    texts = Texts(tiny_target(loaded_tiny(family, seed=1), tap_layers=taps))
    tokens = prompt(7, 61)
    rows = texts.layout([ExtendRows(0, 0, tokens, completes=True)], DraftTree.empty(1))
    features = texts.target.forward(rows, texts.table).features
    assert features is not None
    assert_close(features, torch.cat([stock_layer_outputs(family, tokens)[tap] for tap in taps], dim=-1))


@torch.inference_mode()
def stock_layer_outputs(family: str, tokens: list[int]) -> list[Tensor]:
    """What each layer of the stock model returns. # -> per layer [tokens, hidden]"""
    model, outputs = stock_tiny(family, seed=1), []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        outputs.append(output[0])

    hooks = [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return outputs


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_slots_of_no_one_are_never_read(family: str) -> None:
    texts = Texts(tiny_target(loaded_tiny(family)))
    for layer in keys_and_values(texts.target.pool):
        layer[:, NULL_SLOT + 1 :] = torch.nan
    text = prompt(8, 100)
    texts.extend(0, text[:-1], 9)
    found = texts.run([ExtendRows(0, 99, text[-1:], completes=True)], tree_of([5, 6], [-1, -1]))
    assert_close(found[0], stock_logits(family, text)[-1])
    assert_close(found[2], stock_logits(family, [*text, 6])[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_families_run_as_a_list_of_ops(family: str) -> None:
    target = tiny_target(loaded_tiny(family))
    assert target.runs_by_ops
    assert len(decoder_layers(target.model)) == 0


def test_a_standard_layer_that_is_used_in_another_way_keeps_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Granite's names are Llama's, but it scales what layers add."""
    model = loaded_tiny("llama").model
    attention = decoder_layers(model)[1].get_submodule("self_attn")
    plain = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **named: (plain(*args, **named)[0] * 0.9, None))
    bound(model)
    assert len(decoder_layers(model)) == 3


def test_kernels_that_compute_something_else_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ops.on(torch.device("cpu"))
    true = table.plan_linear
    monkeypatch.setattr(table, "plan_linear", lambda weight, *how: true(-weight, *how))
    with pytest.raises(StartupError, match="make install"):
        tiny_target(loaded_tiny("llama"))


@pytest.mark.parametrize("completes", [False, True])
def test_only_chains_that_complete_have_logits(completes: bool) -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    assert texts.run([ExtendRows(0, 0, [1, 2, 3], completes)]).shape == (int(completes), VOCAB_SIZE)


@pytest.mark.parametrize("chunk", [1, 64])
def test_attention_sinks_are_applied(chunk: int, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False}
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        rope_parameters=yarn | {"rope_theta": 150_000.0, "beta_fast": 32.0, "beta_slow": 1.0},
    )
    save_model(GptOssForCausalLM(config), tmp_path)
    texts, tokens = Texts(tiny_target(load(tmp_path, unverified=True))), prompt()
    ends = [min(at + chunk, LENGTH) - 1 for at in range(0, LENGTH, chunk)]
    with torch.inference_mode():
        expected = stock(tmp_path)(torch.tensor([tokens])).logits[0]
    assert_close(texts.extend(0, tokens, chunk), expected[ends])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"alibi": 1}, "alibi"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9)}, "attention_mask"),
        ({"key": torch.zeros(1, 4, 9, 12)}, "have the shape"),
        ({"value": torch.zeros(1, 2, 9, 8)}, "have the shape"),
        ({"times": 2}, "do not call attention exactly once"),
        ({"times": 0}, "do not call attention exactly once"),
        ({"position_ids": torch.zeros(1, 9), "use_cache": False}, ""),
    ],
    ids=["argument", "mask", "key", "value", "twice", "never", "harmless"],
)
def test_attention_that_is_not_plain_is_refused(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_tiny("llama").model
    layer = decoder_layers(model)[1].get_submodule("self_attn")
    arguments: dict[str, Any] = {"query": torch.zeros(1, 4, 9, 12), "attention_mask": None}
    arguments |= {name: torch.zeros(1, 2, 9, 12) for name in ("key", "value")} | changes
    times = arguments.pop("times", 1)

    def attend(hidden_states: Tensor, tree_step: AttentionStep, **_: object) -> tuple[Tensor, None]:
        for _time in range(times):
            slot_attention(layer, **arguments, tree_step=tree_step)
        return hidden_states, None

    monkeypatch.setattr(layer, "forward", attend)
    with pytest.raises(StartupError, match=complaint) if complaint else nullcontext():
        bound(model)


def test_attention_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded_tiny("llama").model
    monkeypatch.setattr(decoder_layers(model)[0].get_submodule("self_attn"), "is_causal", False)
    with pytest.raises(StartupError, match="bidirectional"):
        bound(model)


def bound(model: PreTrainedModel) -> Target:
    """As a target, which takes it over."""
    return Target(model, KVPool(loaded_tiny("llama").kv_shape, 50, torch.device("cpu")))


def test_a_tied_embedding_keeps_its_weight_and_a_subclass_of_linear_is_left_alone() -> None:
    class Special(nn.Linear):
        pass

    tied = nn.ModuleDict({"embedding": nn.Embedding(16, 8), "head": nn.Linear(8, 16, bias=False), "own": Special(8, 8)})
    table = tied["head"].weight = tied["embedding"].weight
    x = torch.randn(3, 8)
    before = tied["head"](x)
    assert replace_linears(tied, ops.on(torch.device("cpu"))) == 1
    assert tied["embedding"].weight is table
    torch.testing.assert_close(tied["head"](x), before)


# The start-up check of numerics confirms what is exact and notices what is not; its forwards are the engine's.


def test_attention_that_depends_on_company_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Company:
        """Attention whose last bits depend on how many rows are in the forward."""

        def __init__(self, plan: Attention) -> None:
            self._plan = plan

        def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
            return self._plan.attend(query, pool, form) * (1 + 1e-6 * (query.shape[0] % 5))

    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_attention
    monkeypatch.setattr(table, "plan_attention", lambda *args, **sizes: Company(true_plan(*args, **sizes)))
    monkeypatch.setattr(table, "plan_layers", ops.REFERENCE.plan_layers)  # which asks any attention
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_products_that_depend_on_the_number_of_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ops.on(torch.device("cpu"))
    true_plan = table.plan_linear

    def plan(*given: Any) -> Product:
        product = true_plan(*given)
        return lambda x: product(x) * (1.0 if x.shape[0] % 8 else 1 + 1e-6)

    monkeypatch.setattr(table, "plan_linear", plan)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"


def test_references_alone_are_not_called_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is compiled: libraries sum in other orders for other numbers of rows."""
    monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    assert check(tiny_target(loaded_tiny("llama"))) == "tolerant"
