"""A tiny random SpecBlock drafter and its borrowed embedding."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from drafters.network.blocks import TrainedWeights
from drafters.network.checkpoint import weights_of
from drafters.network.config import config_from
from drafters.network.drafter import SpecBlockDrafter
from drafters.network.model import SpecBlock
from drafters.network.pool import EntryPool, EntryState
from drafters.network.served import ServingNetwork
from drafters.network.serving import forward_of
from drafters.protocol import Committed, DraftingSizes, Noise, Read
from drafters.tree import Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture
from kernels.lattice import NUM_FEATURES
from kernels.layers import Embedding
from service.engine.initial_drafter import layers_for
from tests.tiny_models import VOCAB_SIZE, stock_tiny

DRAFT_VOCAB = 64
MASK_TOKEN = 3
TAPS = (0, 1, 2)


@cache
def target_config(family: str) -> Mapping[str, Any]:
    """By which a tiny target's drafter has its layers."""
    return layers_for(stock_tiny(family).config.get_text_config())


def tiny_drafter(family: str = "llama", seed: int = 0, **changes: Any) -> SpecBlock:
    """Random weights, spread wide enough that a wrong key or position changes every state; `changes` are fields of
    `config.json`."""
    mask: dict[str, Any] = {"mask_token": MASK_TOKEN} if changes.get("silent_first") else {}
    sizes = {"target": target_config(family), "tap_layers": TAPS, "draft_vocab_size": DRAFT_VOCAB, "rank_hidden": 16}
    config = config_from({**sizes, **mask, **changes})
    torch.manual_seed(seed)  # behind what draws random numbers in its first call only
    model = SpecBlock(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 / parameter.shape[1] ** 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.set_vocabulary(torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB].sort().values)
    return model.eval().requires_grad_(False)


def serving(model: SpecBlock) -> ServingNetwork:
    """With the weights of this one."""
    return ServingNetwork(model.config, weights_of(model))


def computed(network: ServingNetwork) -> list[Tensor]:
    """What it makes of a text: states, logits, scores of ranks, and what is drafted."""
    config, drawn = network.config, torch.Generator().manual_seed(0)
    width, count = len(config.tap_layers) * config.hidden_size, 5
    pool = EntryPool(network, count + 1, sequences=1, live=config.forward_size)
    state = EntryState(DraftingSizes(max_sequences=1, max_length=count, max_nodes=0), pool, width, network.dtype)
    rows, counts = torch.tensor([0]), torch.tensor([count])
    tokens = torch.randint(config.target_vocab_size, (1, count), generator=drawn)
    slots, features = torch.arange(count)[None] + 1, torch.randn(1, count, width, generator=drawn)
    state.wait(rows, torch.tensor([0]), counts, slots, features, tokens)
    table = torch.randn(config.target_vocab_size, config.hidden_size, generator=drawn)
    forward = forward_of(network, lambda ids: embedding(ids, table), pool, state)
    states, _ = forward.first(rows, state.take(rows, count))
    features = torch.randn(*states.shape[:-1], NUM_FEATURES, generator=drawn)
    return [states, network.head(states), network.rank_logits(states, features), network.d2t, network.t2d]


def serves(network: ServingNetwork, weights: Mapping[str, Tensor]) -> bool:
    """Whether these are its weights: a network that is made of them computes the same bits."""
    expected = computed(ServingNetwork(network.config, weights))
    return all(torch.equal(one, other) for one, other in zip(computed(network), expected, strict=True))


def tiny_table(hidden: int, seed: int = 1) -> Tensor:
    return torch.randn(VOCAB_SIZE, hidden, generator=torch.Generator().manual_seed(seed))


def tiny_embedding(hidden: int, seed: int = 1) -> Embedding:
    """A random embedding of the tiny vocabulary."""
    return Embedding(tiny_table(hidden, seed))


class FedDrafter:
    """A drafter, and sequences with random features, which it gets position by position. Row r has sequence r, or the
    only one."""

    def __init__(
        self,
        model: SpecBlock,
        *,
        sequences: int,
        rows: int,
        length: int,
        max_nodes: int,
        capture: Capture | None = None,
        **weights: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        config, count = model.config, sequences * length
        self.tokens = torch.randint(VOCAB_SIZE, (sequences, length + 1), generator=generator)
        self.features = torch.randn(sequences, length, config.features_size, generator=generator)
        self.slots = torch.randperm(count, generator=generator).view(sequences, length) + 1
        sizes = DraftingSizes(
            max_sequences=rows, max_length=length, max_nodes=max_nodes, num_slots=count + 1, capture=capture
        )
        trained = TrainedWeights(serving(model), tiny_embedding(config.hidden_size), **weights)
        self.drafter = SpecBlockDrafter(sizes, trained)

    def read(self, row: int, start: int, end: int) -> None:
        number, span = row % len(self.tokens), slice(start, end)
        tokens = self.tokens[number, start + 1 : end + 1]
        self.drafter.read(Read(row, start, tokens, self.slots[number, span], self.features[number, span]))

    def commit(self, rows: list[int], positions: list[int], count: int = 1) -> None:
        """So many tokens after these positions were chosen, without a tree."""
        at = torch.tensor(positions)[:, None] + torch.arange(count)
        numbers = torch.tensor(rows)[:, None] % len(self.tokens)
        tree, result = DraftTree.empty(len(rows)), VerifyResult(*[at[:, :0]] * 3)
        chosen = torch.tensor(rows), self.tokens[numbers, at + 1], torch.full((len(rows),), count)
        read = self.features[numbers, at], at[:, 0], self.slots[numbers, at]
        self.drafter.commit(Committed(*chosen, tree, result, *read))

    def grow(self, rows: list[int], roots: list[int], temperature: float = 0.0) -> Candidates:
        seeds = torch.tensor(rows)
        noise = Noise(seeds + 3, torch.full((len(rows),), temperature), torch.tensor(roots))
        return self.drafter.grow(seeds, noise).take(torch.arange(len(rows)))
