"""Sees what each forward of a SpecBlock drafter proposes, from outside: hooks on its network note the states that the
heads read and the nodes at which blocks start, and the heads are asked once more afterwards.

Costs about as much as drafting, so it belongs to observed runs only. Decides nothing.
Legend: batch, starts, block = K, hidden as in drafters/specblock/drafter.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.protocol import Noise
from drafters.specblock.heads import Proposal, TreeNoise, propose
from drafters.specblock.model import Embed, SpecBlock
from service.bench.records import BlockRecord, TokenPath


@dataclass(frozen=True, slots=True)
class _Forward:
    states: Tensor  # [batch, starts, block, hidden]
    contexts: Tensor  # [batch, starts, hidden], meaningless for a tree's first forward
    picked: Tensor  # [batch, starts] int64, tokens at the starts, meaningless for a tree's first forward


class BlockWatch:
    """Watches a network from `embed` and hooks, until `close`; `collect` belongs after each tree."""

    def __init__(self, model: SpecBlock, embed: Embed) -> None:
        self._model = model
        self._embed = embed
        self._forwards: list[_Forward] = []
        self._contexts = self._picked = torch.empty(0)
        self._hooks = [
            model.input_layer.condition_norm.register_forward_pre_hook(self._note_contexts),
            model.lm_head.register_forward_pre_hook(self._note_states),
        ]

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding; the drafter under watch must be given this one."""
        self._picked = tokens
        return self._embed(tokens)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.inference_mode()
    def collect(self, noise: Noise) -> list[list[BlockRecord]]:
        """The blocks of the tree just grown, for each sequence of the batch."""
        forwards, self._forwards = self._forwards, []
        batch = noise.seeds.shape[0]
        size = self._model.config.block_size
        tree_noise = TreeNoise.of(noise, len(forwards) * size, self._model.d2t)
        starts: list[list[TokenPath]] = [[()] for _ in range(batch)]
        blocks: list[list[BlockRecord]] = [[] for _ in range(batch)]
        for number, forward in enumerate(forwards):
            if number:
                starts = _starts(forwards[number - 1], forward, blocks, starts)
            found = _blocks(number, self._proposal(forward, starts, tree_noise), starts)
            blocks = [[*before, *new] for before, new in zip(blocks, found, strict=True)]
        self._forwards = []  # asking the heads again has set off the hooks
        return blocks

    def _proposal(self, forward: _Forward, starts: list[list[TokenPath]], noise: TreeNoise) -> Proposal:
        device = forward.states.device
        origin = torch.tensor([[len(path) for path in line] for line in starts], device=device)
        ahead = torch.arange(forward.states.shape[2], device=device)
        return propose(self._model, forward.states, origin[..., None] + 1 + ahead, noise)

    def _note_contexts(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._contexts = args[0]

    def _note_states(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._forwards.append(_Forward(args[0], self._contexts, self._picked))


def _starts(
    before: _Forward, forward: _Forward, blocks: list[list[BlockRecord]], starts: list[list[TokenPath]]
) -> list[list[TokenPath]]:
    """Paths of the nodes at which a forward's blocks start: a block's context is its node's own last state."""
    same = (before.states[:, None] == forward.contexts[:, :, None, None]).all(-1)  # [batch, starts, starts, block]
    assert bool(same.flatten(2).any(2).all()), "a block that starts at no node of the forward before it"
    places = same.flatten(2).to(torch.uint8).argmax(2)  # [batch, starts]
    size = before.states.shape[2]
    return [
        [
            _path_to(mine[len(mine) - len(origins) + place // size], place % size, token)
            for place, token in zip(line, tokens, strict=True)
        ]
        for line, tokens, mine, origins in zip(places.tolist(), forward.picked.tolist(), blocks, starts, strict=True)
    ]


def _path_to(block: BlockRecord, position: int, token: int) -> TokenPath:
    return (*block.start, *(ranks[0] for ranks in block.tokens[:position]), token)


def _blocks(number: int, proposal: Proposal, starts: list[list[TokenPath]]) -> list[list[BlockRecord]]:
    tokens = proposal.tokens.tolist()
    classes = proposal.odds.classes.argmax(-1).tolist()
    return [
        [
            BlockRecord(number, start, tuple(map(tuple, ranks)), tuple(likeliest))
            for start, ranks, likeliest in zip(paths, line_tokens, line_classes, strict=True)
        ]
        for paths, line_tokens, line_classes in zip(starts, tokens, classes, strict=True)
    ]
