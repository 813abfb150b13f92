"""Listens to drafters and keeps a record of each step, with the truth added once the text is known.

A step's candidates are judged by how the text went on later, not only by what was verified: no choice of nodes
changes the text, so every candidate has a fate.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from drafters.protocol import Committed, DraftContext
from drafters.tree import MAX_DEPTH, DraftTree
from service.bench.records import BlockRecord, Odds, StepRecord, paths_of


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
