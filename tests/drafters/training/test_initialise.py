"""The start of training: copies are copies, and the copied layers receive what they were made for."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafters.network.config import config_from
from drafters.network.model import SpecBlock
from drafters.trained.dflash import MaskTokens
from drafters.trained_kinds import trained_kind
from drafters.training.corpus import TOP, Example, TrainingError
from drafters.training.initialise import InputSums, TargetEnd, initialise
from tests.tiny_models import VOCAB_SIZE, randomise

LAYERS, HIDDEN = 8, 32


@cache
def target() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    randomise(model, 0)
    model.eval().requires_grad_(False)
    return model


def end() -> TargetEnd:
    model = target()
    layers = list(model.get_decoder().get_submodule("layers").children())
    norm, head = model.get_decoder().get_submodule("norm"), model.get_submodule("lm_head").get_parameter("weight")
    return TargetEnd(layers, norm, head)


def embed(tokens: Tensor) -> Tensor:
    return table()[tokens]


def table() -> Tensor:
    return target().get_input_embeddings().get_parameter("weight")


def read_examples(taps: tuple[int, ...], count: int = 60) -> list[Example]:
    """Random texts and what the target's layers say of them."""
    generator = torch.Generator().manual_seed(1)
    found: dict[int, Tensor] = {}
    layers = end().layers
    hooks = [
        layers[tap].register_forward_hook(lambda module, args, output, tap=tap: found.update({tap: output}))
        for tap in taps
    ]
    examples = []
    for _ in range(count):
        tokens = torch.randint(VOCAB_SIZE, (40,), generator=generator)
        target()(input_ids=tokens[None], use_cache=False)
        features = torch.cat([found[tap][0] for tap in taps], dim=-1)
        labels = torch.zeros(31, TOP)
        examples.append(Example(tokens, features, 10, labels.int(), labels))
    for hook in hooks:
        hook.remove()
    return examples


def drafter(taps: tuple[int, ...], **changes: Any) -> SpecBlock:
    torch.manual_seed(0)
    mask: dict[str, Any] = {"mask_token": 7} if changes.get("silent_first") else {}
    layers = changes.pop("target", target().config.to_dict())
    sizes = {"target": layers, "tap_layers": taps, "draft_vocab_size": 64, "rank_hidden": 16}
    model = SpecBlock(config_from({**sizes, **mask, **changes}))
    model.set_vocabulary(torch.arange(0, VOCAB_SIZE, 5))
    return model


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_layers_norm_and_head_are_the_targets_own() -> None:
    model = drafter((2, 4, 5))
    made = initialise(model, end(), embed, read_examples((2, 4, 5)), positions=500, generator=drawn())
    assert made["exact"]
    assert made["positions"] >= 500
    own = list(model.decoder.layers)
    for layer, source in zip(own, end().layers[-2:], strict=True):
        assert all(torch.equal(value, source.state_dict()[name]) for name, value in layer.state_dict().items())
    assert torch.equal(model.decoder.norm.get_parameter("weight"), end().norm.get_parameter("weight"))
    assert torch.equal(model.lm_head.weight, end().head[model.d2t])


def test_copied_layers_find_the_targets_own_keys_and_values_where_these_are_injected() -> None:
    shape, examples = trained_kind("treeflash").shape, read_examples((2, 4, 5))
    model = drafter((2, 4, 5), kind="treeflash", **shape)
    made = initialise(model, end(), embed, examples, positions=10_000, generator=drawn())
    assert made["exact"]
    assert made["explained"] > 0.2
    example = examples[0]
    positions = torch.arange(example.length)[None]
    key, value = model.injected(model.input_layer.condition(example.features[None]), positions)[0]
    cached = target()(input_ids=example.tokens[None], use_cache=True).past_key_values.layers[LAYERS - 2]
    torch.testing.assert_close(key, cached.keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(value, cached.values, atol=1e-4, rtol=1e-4)


def test_mask_tokens_begin_with_the_targets_embedding_and_head() -> None:
    """In layers that the target does not have."""
    layers = {**target().config.to_dict(), "model_type": "qwen3", "head_dim": HIDDEN // 2}
    model = drafter((2, 4, 5), target=layers, kind="dflash", **trained_kind("dflash").shape)
    assert initialise(model, end(), embed, [], positions=1, generator=drawn()) == {}
    assert isinstance(model.input_layer, MaskTokens)
    assert torch.equal(model.input_layer.mask_embedding, table()[7])
    assert torch.equal(model.lm_head.weight, end().head[model.d2t])
    hidden = torch.randn(1, 5, HIDDEN)
    rotary = model.decoder.shape.rotary(torch.arange(5)[None], torch.float32)
    for layer in model.decoder.layers:
        assert torch.equal(layer(hidden, rotary, lambda query, key, value: query), hidden)


def test_layers_unlike_the_targets_begin_by_passing_everything_through() -> None:
    model = drafter((2, 4, 5))
    initialise(model, replace(end(), standard=False), embed, read_examples((2, 4, 5)), positions=500, generator=drawn())
    hidden = torch.randn(1, 5, HIDDEN)
    rotary = model.decoder.shape.rotary(torch.arange(5)[None], torch.float32)
    for layer in model.decoder.layers:
        assert torch.equal(layer(hidden, rotary, lambda query, key, value: query), hidden)
    assert torch.equal(model.lm_head.weight, end().head[model.d2t])


def test_the_first_entry_of_a_block_is_the_predicted_feature() -> None:
    """What the block's first entry receives is near the true feature, nearer yet on positions it was solved for."""
    model, examples = drafter((2, 4, 5)), read_examples((2, 4, 5))
    made = initialise(model, end(), embed, examples, positions=10_000, generator=drawn())
    layer = model.input_layer
    inputs, wanted = [], []
    for example in examples:
        known, embedded = example.features[8:-1], table()[example.tokens[9:]]
        inputs.append(layer.blocks(layer.condition(known), embedded, slice(1))[:, 0])
        wanted.append(example.features[9:, -HIDDEN:])
    got, true = torch.cat(inputs).detach(), torch.cat(wanted)
    share = 1 - (got - true).square().mean(0) / (true - true.mean(0)).square().mean(0)
    assert 0.3 < made["explained"] < float(share.mean()) < 1


def test_a_feature_that_is_linear_in_the_known_is_found() -> None:
    model = drafter((2, 4, 5))
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(HIDDEN, HIDDEN, generator=generator)
    examples = []
    for example in read_examples((2, 4, 5)):
        unit = torch.nn.functional.rms_norm(table()[example.tokens], (HIDDEN,))
        features = torch.cat([example.features[:, : 2 * HIDDEN], 300.0 * unit @ mix + 7.0], dim=-1)
        examples.append(Example(example.tokens, features, 10, example.top_ids, example.top_logprobs))
    made = initialise(model, end(), embed, examples, positions=10_000, generator=drawn())
    assert made["explained"] > 0.99


def test_taps_leave_their_norm_with_unit_deviation() -> None:
    model, examples = drafter((2, 4, 5)), read_examples((2, 4, 5))
    examples = [
        Example(e.tokens, e.features * torch.logspace(0, 2, 3 * HIDDEN), 10, e.top_ids, e.top_logprobs)
        for e in examples
    ]
    sums = InputSums(model.config, "cpu")
    for one in examples:
        sums.add(one, embed)
    model.input_layer.solve(sums, drawn())
    known = torch.cat([e.features[:-1] for e in examples])
    for norm, tap in zip(model.input_layer.feature_norms.children(), known.chunk(3, dim=-1), strict=True):
        sizes = norm(tap).square().mean(0).sqrt()
        assert (sizes - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("taps", "changes", "exact"),
    [((2, 4, 5), {"num_layers": 3}, False), ((2, 4, 6), {"num_layers": 1}, True), ((1, 2, 3), {}, False)],
)
def test_other_depths_start_from_the_nearest_feature(
    taps: tuple[int, ...], changes: dict[str, int], exact: bool
) -> None:
    made = initialise(drafter(taps, **changes), end(), embed, read_examples(taps), positions=10_000, generator=drawn())
    assert made["exact"] is exact
    assert made["explained"] > 0.2


@pytest.mark.parametrize("changes", [{"shift": False}, {"broadcast": False}])
def test_ablated_drafters_start_too(changes: dict[str, bool]) -> None:
    examples = read_examples((2, 4, 5))
    made = initialise(drafter((2, 4, 5), **changes), end(), embed, examples, positions=10_000, generator=drawn())
    assert made["explained"] > 0.2


def test_too_many_layers_and_no_texts_are_refused() -> None:
    with pytest.raises(TrainingError, match="target has 8 layers"):
        initialise(drafter((2, 4, 5), num_layers=9), end(), embed, [], positions=1, generator=drawn())
    with pytest.raises(TrainingError, match="nothing to train on"):
        initialise(drafter((2, 4, 5)), end(), embed, [], positions=1, generator=drawn())
