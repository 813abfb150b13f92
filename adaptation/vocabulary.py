"""Which tokens the drafter should be able to propose, by what the target says today.

A reduced draft vocabulary is cheap because most tokens are rare; which ones are depends on the traffic, and a token
that cannot be proposed ends every draft. So places of tokens that are not seen go to tokens that are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import ConfigDict, NonNegativeFloat, NonNegativeInt, TypeAdapter
from torch import Tensor

from adaptation.policy import State
from drafters.specblock.model import SpecBlock

Rows = Callable[[Tensor], Tensor]
"""Output rows of tokens as nobody has trained them here. # d2t [draft_vocab] int64 -> [draft_vocab, hidden]"""

_HALF_LIFE = 65_536
_MOST_OF_A_QUERY = 4  # times that one query may count for a token: no single text decides
_LEAST_KEPT = 0.5  # a count below it is as good as none, and is not stored


@dataclass
class _Said:
    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    tokens: list[NonNegativeInt]
    counts: list[NonNegativeFloat]


_SAID = TypeAdapter(_Said)


class TokenCounts:
    """How often each token was said of late."""

    def __init__(self, vocab: int, *, half_life: int = _HALF_LIFE) -> None:
        """`half_life`: tokens seen after which one counts half."""
        self._counts = torch.zeros(vocab)
        self._half_life = half_life

    @property
    def total(self) -> float:
        return float(self._counts.sum())

    def observe(self, tokens: Sequence[int]) -> None:
        """The tokens of one query."""
        ids, times = torch.tensor(tokens, dtype=torch.int64).unique(return_counts=True)
        self._counts *= 0.5 ** (len(tokens) / self._half_life)
        self._counts[ids] += times.clamp(max=_MOST_OF_A_QUERY)

    def of(self, tokens: Tensor) -> Tensor:
        return self._counts[tokens.cpu()]

    def likeliest(self, size: int) -> Tensor:
        """The tokens said most often; of those said equally often the first ones, which tokenizers number by frequency.
        # -> [size] int64, ascending"""
        return self._counts.argsort(descending=True, stable=True)[:size].sort().values

    def missing(self, vocabulary: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that are not in it and how often they were said, most frequent first."""
        counts = self._counts.clone()
        counts[vocabulary.cpu()] = 0
        order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
        return order, counts[order]

    def state(self) -> State:
        said = (self._counts >= _LEAST_KEPT).nonzero()[:, 0]
        return {"tokens": said.tolist(), "counts": self._counts[said].tolist()}

    def restore(self, state: State) -> None:
        """Raises ValueError for what no counts have written, and then changes nothing."""
        said, counts = _SAID.validate_python(state), torch.zeros_like(self._counts)
        if len(said.tokens) != len(said.counts) or max(said.tokens, default=0) >= counts.shape[0]:
            raise ValueError("counts of tokens that do not fit this target")
        counts[torch.tensor(said.tokens, dtype=torch.int64)] = torch.tensor(said.counts)
        self._counts = counts


class DraftVocabulary:
    """Proposes exchanges; who trains makes them."""

    def __init__(self, counts: TokenCounts, *, least_count: int) -> None:
        """`least_count`: how often a token must have been said more than the one whose place it takes; 0: never."""
        self.counts = counts
        self._least_count = least_count

    def observe(self, tokens: Sequence[int]) -> None:
        """The answer of one query that may be learnt from."""
        if self._least_count:
            self.counts.observe(tokens)

    def wanted(self, vocabulary: Tensor) -> Tensor:
        """The vocabulary with missing tokens in the places of those said least; whatever stays keeps its place.

        Of tokens said equally rarely the last ones leave: deployed vocabularies rise by id, and tokenizers number
        rare tokens last. # [draft_vocab] int64, target ids, twice
        """
        if not self._least_count:
            return vocabulary
        missing, their_counts = self.counts.missing(vocabulary)
        ours = self.counts.of(vocabulary)
        leaving = ours.flip(0).argsort(stable=True)[: missing.shape[0]]
        leaving = ours.shape[0] - 1 - leaving
        missing, their_counts = missing[: leaving.shape[0]], their_counts[: leaving.shape[0]]
        worth = their_counts >= ours[leaving] + self._least_count
        changed = vocabulary.clone()
        changed[leaving[worth].to(vocabulary.device)] = missing[worth].to(vocabulary.device)
        return changed


def untrained_rows(deployed: SpecBlock, target_head: Tensor | None) -> Rows:
    """The deployed drafter's rows for tokens that it could propose, and the target's own for all others.

    Drafters predict the target's hidden state, so that its rows fit; deployed heads often are those rows.
    `deployed` stays as it is; target_head [target_vocab, hidden], None where the vocabulary stays too
    """

    def rows(vocabulary: Tensor) -> Tensor:
        if torch.equal(vocabulary, deployed.d2t):
            return deployed.lm_head.weight.detach()
        assert target_head is not None, "there are no rows for other tokens"
        known = deployed.t2d[vocabulary]
        found = target_head[vocabulary.to(target_head.device)].to(deployed.lm_head.weight)
        return torch.where((known >= 0)[:, None], deployed.lm_head.weight.detach()[known.clamp(min=0)], found)

    return rows
