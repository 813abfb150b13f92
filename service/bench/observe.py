"""Drafters under observation: what each source proposed in every step, and how the text went on."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters.gating import DrafterGate
from drafters.merged import MergedDrafter
from drafters.protocol import Committed, DraftContext, Drafter, Noise, RankOutcomes, Read
from drafters.registry import MERGED, TRAINED, TrainedWeights
from drafters.specblock.heads import Proposal, TreeNoise, propose
from drafters.specblock.model import Embed, SpecBlock
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one sequence."""

    root: int  # the last committed token before the step
    truth: TokenPath  # what followed the root, as far as the text went
    accepted: int  # accepted length; truth[accepted] is the bonus token
    candidates: Odds = field(default_factory=dict)  # the whole tree, all sources merged
    proposals: Mapping[str, Odds] = field(default_factory=dict)  # by source; empty when nobody was asked
    blocks: tuple[BlockRecord, ...] = ()
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


@dataclass(slots=True)
class _Draft:
    """What is known of a step before it is verified."""

    candidates: Odds = field(default_factory=dict)
    proposals: dict[str, Odds] = field(default_factory=dict)
    blocks: tuple[BlockRecord, ...] = ()


class Recorder:
    """Records of all sequences of an engine; a sequence's steps are complete when it has finished."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._drafts: defaultdict[int, _Draft] = defaultdict(_Draft)
        self._steps: defaultdict[int, list[tuple[int, StepRecord]]] = defaultdict(list)
        self._done: list[StepRecord] = []

    def take(self) -> list[StepRecord]:
        """The steps of all sequences that have finished since the last call."""
        done, self._done = self._done, []
        return done

    def started(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._texts[context.row] = list(context.tokens)

    def proposed(self, source: str, rows: Tensor, tree: DraftTree) -> None:
        """One source's proposals."""
        for row, odds in zip(rows.tolist(), odds_of(tree), strict=True):
            self._drafts[row].proposals[source] = odds

    def forwarded(self, rows: Tensor, blocks: Sequence[Sequence[BlockRecord]]) -> None:
        """The blocks of a trained drafter, for each row."""
        for row, mine in zip(rows.tolist(), blocks, strict=True):
            self._drafts[row].blocks = tuple(mine)

    def grown(self, rows: Tensor, tree: DraftTree) -> None:
        """The candidates that the engine is given."""
        for row, odds in zip(rows.tolist(), odds_of(tree), strict=True):
            self._drafts[row].candidates = odds

    def committed(self, committed: Committed) -> None:
        verified = odds_of(committed.tree)
        tokens, counts = committed.tokens.tolist(), committed.counts.tolist()
        for line, row in enumerate(committed.rows.tolist()):
            text, draft = self._texts[row], self._drafts.pop(row, _Draft())
            step = StepRecord(
                root=text[-1],
                truth=(),
                accepted=counts[line] - 1,
                candidates=draft.candidates,
                proposals=draft.proposals,
                blocks=draft.blocks,
                verified=frozenset(verified[line]),
            )
            self._steps[row].append((len(text), step))
            text += tokens[line][: counts[line]]

    def finished(self, rows: Sequence[int]) -> None:
        for row in rows:
            text = self._texts.pop(row)
            self._drafts.pop(row, None)
            steps = self._steps.pop(row, [])
            self._done += [replace(step, truth=tuple(text[at : at + MAX_DEPTH + 1])) for at, step in steps]


def odds_of(tree: DraftTree) -> list[Odds]:
    """Survival by path, for each sequence."""
    tokens, parents, survival = tree.tokens.tolist(), tree.parents.tolist(), tree.survival.tolist()
    return [
        dict(zip(paths_of(tokens[line][:count], parents[line][:count]), survival[line], strict=False))
        for line, count in enumerate(tree.num_nodes.tolist())
    ]


def _ignore(*heard: object) -> None:
    """Nobody listens."""


def _same(noise: Noise) -> Noise:
    return noise


class DrafterAround:
    """Behaves as `inner` does; listeners hear of a call after `inner` has answered it."""

    def __init__(
        self,
        inner: Drafter,
        *,
        noise: Callable[[Noise], Noise] = _same,
        started: Callable[[Sequence[DraftContext]], None] = _ignore,
        grown: Callable[[Tensor, Noise, Candidates], None] = _ignore,
        committed: Callable[[Committed], None] = _ignore,
        finished: Callable[[Sequence[int]], None] = _ignore,
    ) -> None:
        self._inner = inner
        self._noise = noise
        self._started = started
        self._grown = grown
        self._committed = committed
        self._finished = finished

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def version(self) -> int:
        return self._inner.version

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self._inner.tap_layers

    @property
    def wants_scores(self) -> bool:
        return self._inner.wants_scores

    @property
    def num_blocks(self) -> int:
        return self._inner.num_blocks

    def start(self, contexts: Sequence[DraftContext]) -> None:
        self._inner.start(contexts)
        self._started(contexts)

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        noise = self._noise(noise)
        candidates = self._inner.grow(rows, noise)
        self._grown(rows, noise, candidates)
        return candidates

    def read(self, read: Read) -> None:
        self._inner.read(read)

    def commit(self, committed: Committed) -> None:
        self._inner.commit(committed)
        self._committed(committed)

    def finish(self, rows: Sequence[int]) -> list[int]:
        predicted = self._inner.finish(rows)
        self._finished(rows)
        return predicted

    def credits(self) -> Mapping[str, int]:
        return self._inner.credits()

    def rank_outcomes(self) -> RankOutcomes:
        return self._inner.rank_outcomes()


def without_noise(inner: Drafter) -> Drafter:
    """The same drafter, kept from seeing the noise the target samples with: it drafts as at temperature 0."""

    def silent(noise: Noise) -> Noise:
        return replace(noise, temperatures=torch.zeros_like(noise.temperatures))

    return DrafterAround(inner, noise=silent)


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
    classes = proposal.chances.classes.argmax(-1).tolist()
    return [
        [
            BlockRecord(number, start, tuple(map(tuple, ranks)), tuple(likeliest))
            for start, ranks, likeliest in zip(paths, line_tokens, line_classes, strict=True)
        ]
        for paths, line_tokens, line_classes in zip(starts, tokens, classes, strict=True)
    ]


_SOURCES = {MERGED: ("lookup", "specblock")}


@dataclass(frozen=True, slots=True)
class Observed:
    """A drafter and who listens to it."""

    drafter: Drafter
    recorder: Recorder


@contextmanager
def observed(
    assembly: Assembly, name: str, weights: TrainedWeights | None = None, *, coupled: bool = True
) -> Iterator[Observed]:
    """The drafter of that name, under observation until the context ends."""
    recorder = Recorder()
    watch = BlockWatch(weights.model, weights.embed) if weights and name in TRAINED else None
    seen = replace(weights, embed=watch.embed) if weights and watch else weights
    try:
        sources = [_source(assembly, source, seen, recorder, watch) for source in _SOURCES.get(name, (name,))]
        whole = DrafterAround(
            _joined(assembly, sources),
            started=recorder.started,
            grown=lambda rows, noise, tree: recorder.grown(rows, tree),
            committed=recorder.committed,
            finished=recorder.finished,
        )
        yield Observed(whole if coupled else without_noise(whole), recorder)
    finally:
        if watch:
            watch.close()


def _source(
    assembly: Assembly, name: str, weights: TrainedWeights | None, recorder: Recorder, watch: BlockWatch | None
) -> Drafter:
    def grown(rows: Tensor, noise: Noise, tree: Candidates) -> None:
        recorder.proposed(name, rows, tree)
        if watch is not None and name in TRAINED:
            recorder.forwarded(rows, watch.collect(noise))

    return DrafterAround(build.make_drafter(name, assembly.target, assembly.limits, weights), grown=grown)


def _joined(assembly: Assembly, sources: Sequence[Drafter]) -> Drafter:
    if len(sources) == 1:
        return sources[0]
    cheap, costly = sources
    limits = assembly.limits
    return MergedDrafter(
        cheap,
        costly,
        max_nodes=limits.max_budget,
        max_sequences=limits.max_sequences,
        device=assembly.target.device,
        gate=DrafterGate(clock=_standing_clock),
    )


def _standing_clock() -> float:
    """By this clock no drafter ever costs anything, so each is always worth asking."""
    return 0.0
