"""Steps of a lookahead drafter whose target is a function of the text."""

from collections.abc import Callable, Sequence

import torch

from drafters.lookahead.drafter import LookaheadDrafter
from drafters.protocol import Committed, DraftingSizes, Noise
from drafters.tree import ROOT, Candidates, DraftTree, VerifyResult
from kernels.graph_runner import Capture
from kernels.trees import select_nodes
from tests.drafters.trees import path_to

Target = Callable[[Sequence[int]], int]


def drafter(capture: Capture | None = None, max_sequences: int = 4, max_nodes: int = 64) -> LookaheadDrafter:
    return LookaheadDrafter(
        DraftingSizes(max_sequences=max_sequences, max_length=256, max_nodes=max_nodes, capture=capture)
    )


def grow(drafts: LookaheadDrafter, rows: Sequence[int], temperature: float = 0.0) -> Candidates:
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    return drafts.grow(torch.tensor(rows), Noise(zeros, zeros + temperature, zeros))


def verify(
    drafts: LookaheadDrafter, texts: dict[int, list[int]], target: Target, tree: DraftTree, behind_padding: int = -1
) -> list[int]:
    """What the target says of each text's tree is committed; texts grow. # -> accepted tokens of each"""
    choices, paths = [], []
    for line, text in enumerate(texts.values()):
        count = int(tree.num_nodes[line])
        words = [[int(tree.tokens[line, place]) for place in path_to(tree, line, node)] for node in range(count)]
        said = [target([*text, *path]) for path in ([], *words)]
        choices.append(said + [behind_padding] * (tree.width - count))
        paths.append(walk(tree, line, said))
    depth = max(map(len, paths))
    rows, roots = torch.tensor(list(texts)), torch.tensor([len(text) - 1 for text in texts.values()])
    emitted = []
    for (text, path), said in zip(zip(texts.values(), paths, strict=True), choices, strict=True):
        new = [*(said[place] for place in (0, *(node + 1 for node in path)))]
        text += new
        emitted.append(new + [-1] * (depth + 1 - len(new)))
    tokens, accepted = torch.tensor(emitted), torch.tensor([len(path) for path in paths])
    padded = torch.tensor([path + [-1] * (tree.width - len(path)) for path in paths], dtype=torch.int64)
    result = VerifyResult(padded, accepted, tokens[:, 0], torch.tensor(choices))
    drafts.commit(Committed(rows, tokens, accepted + 1, tree, result, None, roots, torch.zeros_like(tokens)))
    return accepted.tolist()


def walk(tree: DraftTree, line: int, said: Sequence[int]) -> list[int]:
    """Nodes on the way that the target goes."""
    path: list[int] = []
    node = ROOT
    while True:
        found = [
            child
            for child in range(int(tree.num_nodes[line]))
            if tree.parents[line, child] == node and tree.tokens[line, child] == said[node + 1]
        ]
        if not found:
            return path
        node = found[0]
        path.append(node)


def step(drafts: LookaheadDrafter, texts: dict[int, list[int]], target: Target, budget: int = 16) -> list[int]:
    """Accepted tokens of one step of all texts."""
    candidates = grow(drafts, list(texts))
    tree, _ = select_nodes(candidates, torch.full((len(texts),), budget), budget)
    return verify(drafts, texts, target, tree)


def words(tree: DraftTree, line: int = 0) -> list[list[int]]:
    """The tokens along the path to every node, likeliest node first."""
    nodes = range(int(tree.num_nodes[line]))
    return [[int(tree.tokens[line, place]) for place in path_to(tree, line, node)] for node in nodes]
