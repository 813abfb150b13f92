"""Published forms: their drafters say here what plain torch says of the same weights, and what is none is refused."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters import published
from drafters.protocol import DraftingSizes
from drafters.ranks import class_logits
from drafters.specblock.checkpoint import weights_of
from drafters.specblock.model import SpecBlock
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import EntryPool, EntryState
from drafters.specblock.serving import BlockForward
from service.engine.weights import LoadedModel
from tests.published_forms import mimo, mimo_says, read_as_qwen2
from tests.tiny_models import load

torch.set_num_threads(1)
TEXT = torch.randint(300, (12,), generator=torch.Generator().manual_seed(1))


def network_of(model: SpecBlock) -> ServingNetwork:
    return ServingNetwork(model.config, weights_of(model))


def said(model: SpecBlock, loaded: LoadedModel, features: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
    """What a first block says behind so many committed positions. # -> states and logits [block, ...], features"""
    network, slots = network_of(model), torch.arange(count)[None] + 1
    width = features.shape[-1]
    pool = EntryPool(network, count + 1, lines=1, live=8)
    state = EntryState(DraftingSizes(max_sequences=1, max_length=64, max_nodes=0), pool, width, torch.float32)
    rows, counts = torch.tensor([0]), torch.tensor([count])
    state.append(rows, torch.tensor([0]), counts, slots)
    state.wait(rows, counts, features[None, :count], tokens[None, 1 : count + 1])
    table = loaded.parts.embedding
    forward = BlockForward(network, lambda ids: table[ids], pool, state)
    states = forward.first(rows, state.take(rows, count))[0]
    return states, network.head(states)[0, 0]


@torch.no_grad()
def tapped(model: object, tokens: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Outputs of a stock model's layers. # -> [length, taps * hidden]"""
    outputs: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_hook(
            lambda _, __, output, at=at: outputs.update({at: output if isinstance(output, Tensor) else output[0]})
        )
        for at, layer in enumerate(model.model.layers)  # type: ignore[attr-defined]
    ]
    model(tokens[None])  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    return torch.cat([outputs[layer].view(len(tokens), -1) for layer in layers], dim=-1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_mimo_target_has_a_drafter_that_says_what_its_module_says(tmp_path: Path, tied: bool) -> None:
    folder = mimo(tmp_path / "mimo", tied=tied)
    loaded, stock = load(folder), read_as_qwen2(folder, tmp_path / "qwen2")
    assert loaded.model.config.model_type == "qwen2"
    assert published.kind_of(folder) == "mtp"
    model = published.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    assert model.config.tap_layers == (2,)
    expected = mimo_says(folder, stock, TEXT)
    features = tapped(stock, TEXT, model.config.tap_layers)
    for count in (1, 4, len(TEXT) - 1):
        _, logits = said(model, loaded, features, TEXT, count)
        assert (logits[0] - expected[count - 1]).abs().max() < 1e-4


def test_a_rank_head_that_nobody_taught_says_what_the_draft_says() -> None:
    chances = torch.tensor([0.5, 0.1, 0.1, 0.05, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01])
    expected = torch.tensor([0.5, 0.25, 0.1, 0.15])
    assert torch.allclose(class_logits(chances.log()).softmax(-1), expected, atol=1e-5)
