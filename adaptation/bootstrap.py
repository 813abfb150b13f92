"""The first weights of a drafter for a target that comes without any, made from served queries: sums over their
positions, from which a drafter's input layer is solved in closed form (drafters/training/initialise.py).

It is solved anew whenever there are twice as many positions, for that halves what chance has in it, until a solution is
no longer clearly better than the one before; from there on updates teach. Only sums are kept: their size does not
depend on how much was served, and no text can be read from them.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptation.policy import State
from adaptation.vocabulary import Rows, TokenCounts
from drafters.specblock.checkpoint import weights_of
from drafters.specblock.model import Embed, SpecBlock
from drafters.training.corpus import Example
from drafters.training.initialise import InputSums

_FIRST = 4
"""Positions per unknown of the first solution: with fewer, half of what it explains is chance."""
_LAST = 64  # and of the last one: at this many another doubling explains next to nothing more


@dataclass(frozen=True, slots=True)
class Solution:
    """Weights by name, in fp32."""

    weights: dict[str, Tensor]
    positions: int


class Bootstrap:
    """Collects, and solves when it is due. All calls come from the adaptation thread."""

    done: bool
    wanted: int  # positions, for the next solution
    _sums: InputSums
    _has_published: bool

    def __init__(self, start: SpecBlock, embed: Embed, rows: Rows, counts: TokenCounts, *, seed: int) -> None:
        """`start`: the target's end with an input layer that is yet to be solved; `rows`: the target's output rows of
        draft tokens; `counts`: what is said, by which the draft vocabulary is chosen."""
        self._start, self._embed, self._rows, self._counts, self._seed = start, embed, rows, counts, seed
        self._reset()

    @property
    def positions(self) -> int:
        return self._sums.positions

    @property
    def due(self) -> bool:
        return not self.done and self.positions >= self.wanted

    def add(self, example: Example) -> None:
        """The positions of one text. Raises ValueError where its features are not finite."""
        if not bool(torch.isfinite(example.features.sum(dtype=torch.float32))):
            raise ValueError("features of a text are not finite")
        self._sums.add(example, self._embed)

    @torch.no_grad()
    def solve(self) -> Solution:
        """What can be made of the positions that there are."""
        model = copy.deepcopy(self._start)
        model.set_vocabulary(self._counts.likeliest(model.config.draft_vocab_size).to(model.d2t.device))
        model.lm_head.weight.copy_(self._rows(model.d2t))
        self._sums.solve(model.input_layer, torch.Generator().manual_seed(self._seed))
        return Solution(weights_of(model), self.positions)

    def judged(self, *, published: bool) -> None:
        """What was solved last serves, or does not."""
        self.done = (self._has_published and not published) or self.wanted >= _LAST * self._sums.known
        self._has_published = self._has_published or published
        while self.wanted <= self.positions:
            self.wanted *= 2

    def start_over(self) -> None:
        """What was made of these positions turned out badly."""
        self._reset()

    def state(self) -> State:
        return {"done": self.done, "wanted": self.wanted, "published": self._has_published}

    def restore(self, state: State) -> None:
        """Raises ValueError for what no bootstrap has written, and then changes nothing."""
        done, wanted, published = (state.get(name) for name in ("done", "wanted", "published"))
        if len(state) != 3 or not isinstance(done, bool) or not isinstance(published, bool):
            raise ValueError("not the state of a bootstrap")
        if not isinstance(wanted, int) or wanted < self._sums.known:
            raise ValueError("the state of a bootstrap of another size")
        self.done, self.wanted, self._has_published = done, wanted, published

    def tensors(self) -> Mapping[str, Tensor]:
        """The sums themselves, by name."""
        return self._sums.tensors()

    def _reset(self) -> None:
        self.done, self._has_published = False, False
        self._sums = InputSums(self._start.config, self._start.d2t.device)
        self.wanted = _FIRST * self._sums.known
