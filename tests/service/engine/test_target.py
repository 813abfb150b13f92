"""The target against transformers' own forward: logits, tapped features, chunks, company and trees, per family."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM

from drafters.tree import DraftTree
from kernels.tree_attention import NULL_SLOT
from service.engine.commit import lay_out
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.rows import ExtendRows
from service.engine.target import AttentionStep, Target, decoder_layers, default_tap_layers, slot_attention
from service.errors import StartupError
from tests.service.engine.harness import tiny_target
from tests.tiny_models import EOS_ID, FAMILIES, VOCAB_SIZE, load, loaded_tiny, random_prompts, save_model, stock_tiny

torch.set_num_threads(1)

TOLERANCE = 1e-4
LENGTH = 150  # past the first tail, and several sliding windows long


class Texts:
    """A target's table and slots; runs extends and trees and gives every row's logits."""

    def __init__(self, target: Target, lines: int = 3) -> None:
        self.target = target
        self.slots = SlotPool(target.pool.num_slots, target.device)
        self.table = SlotTable(lines, LENGTH + 20, target.device)

    def extend(self, line: int, tokens: Sequence[int], chunk: int) -> Tensor:
        """Logits after the last token of each chunk. # -> [chunks, vocab]"""
        starts = range(0, len(tokens), chunk)
        return torch.cat([self.run([ExtendRows(line, at, tokens[at : at + chunk], completes=True)]) for at in starts])

    def run(self, extends: list[ExtendRows], tree: DraftTree | None = None) -> Tensor:
        rows = lay_out(extends, tree or DraftTree.empty(len(extends)), self.slots, self.table)
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


@pytest.mark.parametrize("chunk", [1, 7, 64, LENGTH])
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
    rows = lay_out([ExtendRows(0, 0, tokens, completes=True)], DraftTree.empty(1), texts.slots, texts.table)
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
def test_slots_of_nobody_are_never_read(family: str) -> None:
    texts = Texts(tiny_target(loaded_tiny(family)))
    texts.target.pool.storage[:, :, NULL_SLOT + 1 :] = torch.nan
    text = prompt(8, 100)
    texts.extend(0, text[:-1], 9)
    found = texts.run([ExtendRows(0, 99, text[-1:], completes=True)], tree_of([5, 6], [-1, -1]))
    assert_close(found[0], stock_logits(family, text)[-1])
    assert_close(found[2], stock_logits(family, [*text, 6])[-1])


def test_padding_rows_change_nothing() -> None:
    found = []
    for multiple in (1, 8, 16):
        texts = Texts(tiny_target(loaded_tiny("llama")))
        texts.target.row_multiple = multiple
        found.append(texts.extend(0, prompt(9, 21), 5))
        assert texts.target.pool.storage[0, 0].flatten(1).any(1).sum() == 21
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize(
    ("multiple", "fewest", "rows", "padded"), [(1, 1, 1, 1), (8, 1, 1, 8), (1, 4, 1, 4), (2, 4, 5, 6), (8, 4, 9, 16)]
)
def test_forwards_are_padded_to_the_fewest_rows_and_to_the_multiple(
    multiple: int, fewest: int, rows: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    texts.target.row_multiple, texts.target.fewest_rows = multiple, fewest
    seen = []
    hook = texts.target.model.get_decoder().register_forward_hook(
        lambda module, args, output: seen.append(output.last_hidden_state.shape[1])
    )
    found = texts.run([ExtendRows(0, 0, prompt(4, rows), completes=True)])
    hook.remove()
    assert seen == [padded]
    assert_close(found, stock_logits("llama", prompt(4, rows))[-1:])


@pytest.mark.parametrize(("layers", "taps"), [(2, (1, 1, 0)), (3, (2, 1, 0)), (30, (2, 15, 27)), (1, (0, 0, 0))])
def test_default_taps_are_low_middle_and_high(layers: int, taps: tuple[int, int, int]) -> None:
    assert default_tap_layers(layers) == taps


def test_without_taps_there_are_no_features() -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    rows = lay_out([ExtendRows(0, 0, [1, 2], completes=True)], DraftTree.empty(1), texts.slots, texts.table)
    assert texts.target.forward(rows, texts.table).features is None


@pytest.mark.parametrize("completes", [False, True])
def test_only_chains_that_complete_have_logits(completes: bool) -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    assert texts.run([ExtendRows(0, 0, [1, 2, 3], completes)]).shape == (int(completes), VOCAB_SIZE)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        eos_token_id=EOS_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    save_model(GptOssForCausalLM(config), tmp_path)
    with pytest.raises(StartupError, match="s_aux"):
        Texts(tiny_target(load(tmp_path))).run([ExtendRows(0, 0, [1, 2], completes=True)])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"alibi": 1}, "alibi"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention_mask"),
        ({"key": torch.zeros(1, 4, 3, 12)}, "heads by dimensions"),
        ({"value": torch.zeros(1, 2, 3, 8)}, "heads by dimensions"),
        ({"times": 2}, "not one plain attention each"),
        ({"times": 0}, "not one plain attention each"),
        ({"position_ids": torch.zeros(1, 3), "use_cache": False}, ""),
    ],
    ids=["argument", "mask", "key", "value", "twice", "never", "harmless"],
)
def test_attention_that_is_not_plain_is_refused(
    changes: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    layer = attention_of(texts.target, 1)

    padded = -(-3 // texts.target.row_multiple) * texts.target.row_multiple
    arguments: dict[str, Any] = {"query": torch.zeros(1, 4, padded, 12), "attention_mask": None}
    arguments |= {name: torch.zeros(1, 2, padded, 12) for name in ("key", "value")} | changes
    times = arguments.pop("times", 1)

    def attend(hidden_states: Tensor, tree_step: AttentionStep, **_: object) -> tuple[Tensor, None]:
        for _time in range(times):
            slot_attention(layer, **arguments, tree_step=tree_step)
        return hidden_states, None

    monkeypatch.setattr(layer, "forward", attend)
    with pytest.raises(StartupError, match=complaint) if complaint else nullcontext():
        texts.run([ExtendRows(0, 0, [4, 5, 6], completes=True)])


def test_attention_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = Texts(tiny_target(loaded_tiny("llama")))
    monkeypatch.setattr(attention_of(texts.target, 0), "is_causal", False)
    with pytest.raises(StartupError, match="two-way"):
        texts.run([ExtendRows(0, 0, [4, 5], completes=True)])


def attention_of(target: Target, layer: int) -> nn.Module:
    return target.model.get_submodule(f"model.layers.{layer}.self_attn")
