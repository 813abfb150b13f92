"""Drafters under observation: what each source proposed in every step, and how the text went on."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from drafters.coupling import TreeNoise
from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise
from drafters.registry import TrainedWeights, needs_of
from drafters.specblock.heads import Proposal, propose
from drafters.specblock.model import Embed
from drafters.specblock.network import ServingNetwork
from drafters.tree import MAX_DEPTH, Candidates, DraftTree
from service.assembly import Assembly
from service.engine import build

TokenPath = tuple[int, ...]
Odds = Mapping[TokenPath, float]
"""Survival of each node of a tree, parents before children."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One block that a trained drafter proposed."""

    forward: int  # which of the tree's forwards made it, from 0
    start: TokenPath  # the node at which it begins, () for the root
    tokens: tuple[tuple[int, ...], ...]  # [block][rank]
    classes: tuple[int, ...]  # [block], the likeliest rank class by the rank head

    def paths(self) -> list[TokenPath]:
        """Every node it proposes: the first ranks form its spine, the others hang beside it."""
        spine = tuple(ranks[0] for ranks in self.tokens)
        return [(*self.start, *spine[:place], token) for place, ranks in enumerate(self.tokens) for token in ranks]


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step of one sequence, filled in as it goes on."""

    root: int = -1  # the last committed token before the step
    truth: TokenPath = ()  # what followed the root, as far as the text went
    accepted: int = 0  # accepted length; truth[accepted] is the bonus token
    candidates: Odds = field(default_factory=dict)  # the whole tree, all sources merged
    proposals: dict[str, Odds] = field(default_factory=dict)  # by source; empty when nobody was asked
    blocks: list[BlockRecord] = field(default_factory=list)
    verified: frozenset[TokenPath] = frozenset()

    @property
    def emitted(self) -> TokenPath:
        return self.truth[: self.accepted + 1]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[TokenPath]:
    """Paths of nodes that stand after their parents; a parent below 0 is the root."""
    paths: list[TokenPath] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


class Recorder:
    """Records of all sequences of an engine; a sequence's steps are complete when it has finished."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._drafts: defaultdict[int, StepRecord] = defaultdict(StepRecord)  # steps that are not verified yet
        self._steps: defaultdict[int, list[tuple[int, StepRecord]]] = defaultdict(list)
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """The steps of all sequences that have finished since the last call."""
        done, self._done = self._done, []
        return done

    def listen(self, drafter: Drafter) -> None:
        """Record what is asked of the drafter that the engine is given."""
        listen(drafter, "start", self._started)
        listen(drafter, "grow", self._grown)
        listen(drafter, "commit", self._committed)
        listen(drafter, "finish", self._finished)

    def listen_to_source(self, name: str, drafter: Drafter, watch: "BlockWatch | None") -> None:
        """Record what one source proposes, and the blocks of a trained one."""

        def grown(tree: DraftTree, rows: Tensor, noise: Noise) -> None:
            blocks: list[list[BlockRecord]] = watch.collect(noise) if watch else [[] for _ in rows]
            for row, odds, mine in zip(rows.tolist(), odds_of(tree), blocks, strict=True):
                self._drafts[row].proposals[name] = odds
                self._drafts[row].blocks = mine

        listen(drafter, "grow", grown)

    def _started(self, answer: None, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._texts[context.row] = list(context.tokens)

    def _grown(self, tree: DraftTree, rows: Tensor, noise: Noise) -> None:
        for row, odds in zip(rows.tolist(), odds_of(tree), strict=True):
            self._drafts[row].candidates = odds

    def _committed(self, answer: None, committed: Committed) -> None:
        verified = odds_of(committed.tree)
        tokens, counts = committed.tokens.tolist(), committed.counts.tolist()
        for line, row in enumerate(committed.rows.tolist()):
            text, step = self._texts[row], self._drafts.pop(row, StepRecord())
            step.root, step.accepted, step.verified = text[-1], counts[line] - 1, frozenset(verified[line])
            self._steps[row].append((len(text), step))
            text += tokens[line][: counts[line]]

    def _finished(self, answer: object, rows: Sequence[int]) -> None:
        for row in rows:
            text = self._texts.pop(row)
            self._drafts.pop(row, None)
            for at, step in self._steps.pop(row, []):
                step.truth = tuple(text[at : at + MAX_DEPTH + 1])
                self._done.append(step)


def odds_of(tree: DraftTree) -> list[Odds]:
    """Survival by path, for each sequence."""
    tokens, parents, survival = tree.tokens.tolist(), tree.parents.tolist(), tree.survival.tolist()
    return [
        dict(zip(paths_of(tokens[line][:count], parents[line][:count]), survival[line], strict=False))
        for line, count in enumerate(tree.num_nodes.tolist())
    ]


def listen(drafter: Drafter, method: str, told: Callable[..., None]) -> None:
    """Have `told` hear of every call of that method after it: the answer, and what it was given."""
    call = getattr(drafter, method)

    def called(*args: Any) -> Any:
        answer = call(*args)
        told(answer, *args)
        return answer

    setattr(drafter, method, called)


def without_noise(drafter: Drafter) -> Drafter:
    """Keep a drafter from seeing the noise the target samples with: it drafts as at temperature 0."""
    grow = drafter.grow

    def silent(rows: Tensor, noise: Noise) -> Candidates:
        return grow(rows, replace(noise, temperatures=torch.zeros_like(noise.temperatures)))

    drafter.grow = silent  # type: ignore[method-assign]
    return drafter


@dataclass(frozen=True, slots=True)
class _Forward:
    states: Tensor  # [batch, starts, block, hidden]
    contexts: Tensor  # [batch, starts, hidden], meaningless for a tree's first forward
    picked: Tensor  # [batch, starts] int64, tokens at the starts, meaningless for a tree's first forward


class BlockWatch(ServingNetwork):
    """A network with the weights of another that notes what it computes; `collect` belongs after each tree."""

    def __init__(self, network: ServingNetwork, embed: Embed) -> None:
        vars(self).update(vars(network))
        self._embed = embed
        self._forwards: list[_Forward] = []
        self._contexts = self._picked = torch.empty(0)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embedding; the drafter under watch must be given this one."""
        self._picked = tokens
        return self._embed(tokens)

    def blocks(self, context: Tensor, embedded: Tensor) -> Tensor:
        self._contexts = context
        return super().blocks(context, embedded)

    def head(self, states: Tensor) -> Tensor:
        batch, starts = states.shape[:2]
        newest = slice(-batch * starts, None)
        contexts, picked = (values[newest].unflatten(0, (batch, starts)) for values in (self._contexts, self._picked))
        self._forwards.append(_Forward(states, contexts, picked))
        return super().head(states)

    @torch.inference_mode()
    def collect(self, noise: Noise) -> list[list[BlockRecord]]:
        """The blocks of the tree just grown, for each sequence of the batch."""
        forwards, self._forwards = self._forwards, []
        batch = noise.seeds.shape[0]
        size = self.config.block_size
        tree_noise = TreeNoise.of(noise, len(forwards) * size, self.d2t)
        starts: list[list[TokenPath]] = [[()] for _ in range(batch)]
        blocks: list[list[BlockRecord]] = [[] for _ in range(batch)]
        for number, forward in enumerate(forwards):
            if number:
                starts = _starts(forwards[number - 1], forward, blocks, starts)
            found = _blocks(number, self._proposal(forward, starts, tree_noise), starts)
            blocks = [[*before, *new] for before, new in zip(blocks, found, strict=True)]
        self._forwards = []  # asking the heads again has been noted too
        return blocks

    def _proposal(self, forward: _Forward, starts: list[list[TokenPath]], noise: TreeNoise) -> Proposal:
        device = forward.states.device
        origin = torch.tensor([[len(path) for path in line] for line in starts], device=device)
        ahead = torch.arange(forward.states.shape[2], device=device)
        return propose(self, forward.states, origin[..., None] + 1 + ahead, noise)


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
    classes = proposal.chances.classes.argmax(-1).tolist()
    return [
        [
            BlockRecord(number, start, tuple(map(tuple, ranks)), tuple(likeliest))
            for start, ranks, likeliest in zip(paths, line_tokens, line_classes, strict=True)
        ]
        for paths, line_tokens, line_classes in zip(starts, tokens, classes, strict=True)
    ]


def observed(
    assembly: Assembly, name: str, weights: TrainedWeights | None = None, *, coupled: bool = True
) -> tuple[Drafter, Recorder]:
    """The drafter of that name and what records it."""
    recorder = Recorder()
    watch = BlockWatch(weights.network, weights.embed) if weights and "weights" in needs_of(name) else None
    seen = replace(weights, network=watch, embed=watch.embed) if weights and watch else weights
    sources = []
    for source in name.split("+"):
        sources.append(assembly.drafter(source, weights=seen))
        recorder.listen_to_source(source, sources[-1], watch if "weights" in needs_of(source) else None)
    whole = _joined(assembly, sources)
    vars(whole)["timed"] = lambda times: None  # without times nobody is found too dear
    recorder.listen(whole)
    return (whole if coupled else without_noise(whole)), recorder


def _joined(assembly: Assembly, sources: Sequence[Drafter]) -> Drafter:
    """One tree of all sources, none of which ever costs anything: each is always worth asking."""
    if len(sources) == 1:
        return sources[0]
    cheap, costly = sources
    sizes = build.drafting_sizes(assembly.target, assembly.limits)
    return MergedDrafter(cheap, costly, sizes)
