"""The first weights of a drafter for a target that comes without any, made from served queries: sums over their
positions, from which a drafter's input layer is solved in closed form (drafters/training/initialise.py).

It is solved anew whenever there are twice as many positions, for that halves what chance has in it, until a solution is
better than what serves; from there on updates teach, which do more for a second of time than another doubling
(docs/bootstrap.md). Only sums are kept: their size does not depend on how much was served, and no text can be read from
them.
"""

import copy
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from adaptation.checkpoint import LearnerCheckpoint
from adaptation.losses import Rows
from adaptation.policy import State
from adaptation.traffic import TokenCounts
from adaptation.weights import ANCHOR, DrafterWeights
from drafters.regret import SHARE
from drafters.specblock.checkpoint import weights_of, write_weights
from drafters.specblock.model import Embed
from drafters.training.corpus import Example
from drafters.training.initialise import InputSums

_FIRST = 4
"""Positions per unknown of the first solution: with fewer, half of what it explains is chance."""
_LAST = 64  # and of the last one: at this many another doubling explains next to nothing more


class Bootstrap:
    """Collects, and solves when it is due. All calls come from the adaptation thread."""

    def __init__(
        self,
        weights: DrafterWeights,
        embed: Embed,
        rows: Rows,
        checkpoint: LearnerCheckpoint,
        *,
        makes: bool,
        given: Mapping[str, Tensor] | None = None,
        seed: int,
    ) -> None:
        """`makes`: the deployed drafter has the target's end only; else there is nothing to do here. `rows`: the output
        rows of the target for tokens; `given`: weights
        of another target's drafter, to be judged first."""
        self.makes = makes
        self._weights, self._embed, self._rows = weights, embed, rows
        self.counts = TokenCounts(weights.anchor.config.target_vocab_size)  # the draft vocabulary is the most frequent
        self._checkpoint, self._seed = checkpoint, seed
        self._kept_at = self._keeping_seconds = 0.0
        self._given = given if makes else None
        self._sums = self._no_sums() if makes else None
        self.wanted = 0 if self._sums is None else _FIRST * self._sums.known

    @property
    def collects(self) -> bool:
        """Whether the drafter is made of sums still, and no update teaches it yet."""
        return self._sums is not None

    @property
    def positions(self) -> int:
        return 0 if self._sums is None else self._sums.positions

    @property
    def due(self) -> bool:
        return self.collects and (self._given is not None or self.positions >= self.wanted)

    @property
    def serves_nothing(self) -> bool:
        """Whether what is served, or on its way to be, has nothing to say."""
        return self.makes and self._weights.latest.origin == ANCHOR

    def add(self, example: Example) -> None:
        """The positions of one text. Raises ValueError where its features are not finite."""
        if not bool(torch.isfinite(example.features.sum(dtype=torch.float32))):
            raise ValueError("features of a text are not finite")
        assert self._sums is not None, "nothing is collected any more"
        self._sums.add(example, self._embed)
        self.counts.observe(example.tokens[example.prompt :].tolist())

    @torch.no_grad()
    def solve(self) -> dict[str, Tensor]:
        """What can be made of the positions that there are, or what was given. # -> weights by name, fp32"""
        assert self._sums is not None, "nothing is collected any more"
        if self._given is not None:
            return {name: value.float() if value.is_floating_point() else value for name, value in self._given.items()}
        model = copy.deepcopy(self._weights.anchor)
        model.set_vocabulary(self.counts.most_frequent(model.config.draft_vocab_size).to(model.d2t.device))
        model.lm_head.weight.copy_(self._rows(model.d2t))
        self._sums.solve(model.input_layer, torch.Generator().manual_seed(self._seed))
        return weights_of(model)

    def judged(self, solution: dict[str, Tensor], *, published: bool) -> None:
        """The last solution serves now, or it does not. Raises AdaptationError where it cannot be kept."""
        assert self._sums is not None, "nothing was solved"
        self._given = None
        if published or self.wanted >= _LAST * self._sums.known:
            self._sums = None
            self._checkpoint.drop_tensors("sums")
            self.rebase(solution)
            return
        while self.wanted <= self.positions:
            self.wanted *= 2

    def rebase(self, weights: dict[str, Tensor]) -> None:
        """From here on distances are measured to these weights, and updates keep near them. Raises AdaptationError
        where they cannot be kept."""
        write_weights(self._weights.anchor, weights)
        self._checkpoint.save_tensors("anchor", weights_of(self._weights.anchor), origin=self._weights.latest.origin)

    def adopted(self, weights: dict[str, Tensor]) -> None:
        """Somebody brought a drafter: what would be made is not wanted; what was made, or brought before, stays what
        distances are measured to. Raises as `rebase`."""
        if self.collects:
            self._sums = None
            self.rebase(weights)

    def rolled_back(self) -> None:
        """What was made, if anything, may have turned out badly, and the sums behind it are gone."""
        if self.serves_nothing and not self.collects:
            self._sums = self._no_sums()
            self.wanted = _FIRST * self._sums.known

    def training_start(self) -> dict[str, Tensor]:
        """What updates go on from: what is served, or was made last while that is nothing."""
        return weights_of(self._weights.anchor) if self.serves_nothing else self._weights.train_from_served()

    def keep(self, *, always: bool = False) -> bool:
        """Store the sums, as often as that costs no more than its share of the time. # -> whether they were; raises
        AdaptationError"""
        began = time.monotonic()
        if self._sums is None or not (always or began - self._kept_at > self._keeping_seconds / SHARE):
            return False
        self._kept_at = began  # a disk that refuses is not asked all the time either
        self._checkpoint.save_tensors("sums", self._sums.tensors(), origin=self._weights.latest.origin)
        self._keeping_seconds = time.monotonic() - began
        return True

    def state(self) -> State:
        return {"collects": self.collects, "wanted": self.wanted}

    def restore(self, state: State) -> None:
        """Raises ValueError for what no bootstrap has written, and then changes nothing."""
        collects, wanted = state.get("collects"), state.get("wanted")
        if len(state) != 2 or not isinstance(collects, bool):
            raise ValueError("not the state of a bootstrap")
        if not isinstance(wanted, int) or self._sums is None or wanted < self._sums.known:
            raise ValueError("the state of a bootstrap of another size")
        self.wanted = wanted
        if not collects:
            self._sums = None

    def restore_tensors(self) -> None:
        """The sums, and the weights that were made first, as far as they were kept."""
        if not self.makes:
            return
        if self._sums is not None:
            sums = self._sums.tensors()
            for name, value in (self._checkpoint.load_tensors("sums", sums) or {}).items():
                sums[name].copy_(value)
        anchor = weights_of(self._weights.anchor)
        made = self._checkpoint.load_tensors("anchor", anchor)
        if made is None and not self.serves_nothing:
            made = self._weights.train_from_served()
        if made is not None:
            write_weights(self._weights.anchor, made)

    def _no_sums(self) -> InputSums:
        anchor = self._weights.anchor
        return InputSums(anchor.config, anchor.d2t.device)
