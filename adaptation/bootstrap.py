"""Solves for the first weights of a drafter whose target has none: sums over the positions of served queries determine
the drafter's input layer in closed form (drafters/training/initialise.py).

It is solved again whenever there are twice as many positions, which halves the variance, until a solution is better
than what serves. From then on updates train the drafter; they gain more per second than another doubling
(docs/bootstrap.md). Only sums are kept: their size does not depend on the number of queries, and no text can be read
from them.
"""

import copy
import time

import torch
from torch import Tensor

from adaptation.evaluator import Rows
from adaptation.feedback import TokenCounts
from adaptation.persistence import LearnerCheckpoint
from adaptation.policy import State
from adaptation.weights import ANCHOR, DrafterWeights, ServedDrafter
from drafters.decision import SHARE
from drafters.network.checkpoint import weights_of, write_weights
from drafters.training.corpus import Example
from drafters.training.initialise import InputSums

_FIRST = 4
"""Positions per unknown of the first solution: with fewer, half of the variance that it explains is chance."""
_LAST = 64  # positions per unknown of the last solution: another doubling would hardly improve it


class Bootstrap:
    """Collects sums from queries, and solves for a drafter when there are enough. All calls come from the adaptation
    thread."""

    def __init__(
        self,
        weights: DrafterWeights,
        drafter: ServedDrafter,
        rows: Rows,
        checkpoint: LearnerCheckpoint,
        *,
        enabled: bool,
        seed: int,
    ) -> None:
        """`rows`: untrained output rows of a vocabulary; `enabled`: solve for the drafter unless it was deployed with
        weights."""
        self.makes = enabled and not drafter.made
        self.weights = weights
        self.counts = TokenCounts(drafter.config.target_vocab_size)  # the draft vocabulary is chosen from these
        self._embed, self._rows = drafter.embed, rows
        self._checkpoint, self._seed = checkpoint, seed
        self._rests_until = 0.0  # the sums are not stored before
        self._given = drafter.given if self.makes else None
        self._solution: dict[str, Tensor] | None = None  # refused, and trained while more positions are collected
        self._sums = self._no_sums() if self.makes else None
        self.wanted = 0 if self._sums is None else _FIRST * self._sums.known

    @property
    def collects(self) -> bool:
        """Whether sums are collected; then only idle time trains the drafter, once there is a solution."""
        return self._sums is not None

    @property
    def positions(self) -> int:
        """Number of positions in the sums."""
        return 0 if self._sums is None else self._sums.positions

    @property
    def due(self) -> bool:
        """Whether there are enough positions for the next solution, or given weights to try first."""
        if self._sums is None:
            return False
        lost = self._solution is None and self.positions >= _FIRST * self._sums.known  # by an earlier process
        return self._given is not None or lost or self.positions >= self.wanted

    @property
    def trains(self) -> bool:
        """Whether there is something to train in idle time."""
        return not self.collects or self._solution is not None

    @property
    def serves_nothing(self) -> bool:
        """Whether no solution serves or is staged."""
        return self.makes and self.weights.latest.origin == ANCHOR

    def add(self, example: Example) -> None:
        """Add the positions of one text. Raises ValueError if its features are not finite."""
        if not bool(torch.isfinite(example.features.sum(dtype=torch.float32))):
            raise ValueError("features of a text are not finite")
        assert self._sums is not None, "nothing is collected any more"
        self._sums.add(example, self._embed)
        self.counts.observe(example.tokens[example.prompt :].tolist())

    @torch.no_grad()
    def solve(self) -> dict[str, Tensor]:
        """Solve for a drafter, or return the given weights. # -> weights by name in fp32, shapes [...] as in the
        drafter"""
        assert self._sums is not None, "nothing is collected any more"
        if self._given is not None:
            return {name: value.float() if value.is_floating_point() else value for name, value in self._given.items()}
        model = copy.deepcopy(self.weights.anchor)
        model.set_vocabulary(self.counts.most_frequent(model.config.draft_vocab_size).to(model.d2t.device))
        model.lm_head.weight.copy_(self._rows(model.d2t))
        model.input_layer.solve(self._sums, torch.Generator().manual_seed(self._seed))
        return weights_of(model)

    def judged(self, solution: dict[str, Tensor], *, published: bool) -> None:
        """Stop collecting if the solution, shapes [...] as in the drafter, is published or was the last attempt; else
        double the positions that the next one needs. Raises AdaptationError if the solution cannot be stored."""
        assert self._sums is not None, "nothing was solved"
        given, self._given = self._given, None
        if published or self.wanted >= _LAST * self._sums.known:
            self.outgrown(solution)
            return
        self._solution = None if given else solution  # another one is made in place of given weights
        while self.wanted <= self.positions:
            self.wanted *= 2

    def outgrown(self, weights: dict[str, Tensor]) -> None:
        """Stop collecting, and make these weights, shapes [...] as in the drafter, the anchor: training has got further
        with them than another solution would. Raises AdaptationError if they cannot be stored."""
        self._sums = self._solution = None
        self._checkpoint.drop_tensors("sums")
        self.rebase(weights)

    def rebase(self, weights: dict[str, Tensor]) -> None:
        """Make these weights, shapes [...] as in the drafter, the anchor. Raises AdaptationError if they cannot be
        stored."""
        write_weights(self.weights.anchor, weights)
        self._checkpoint.save_tensors("anchor", weights_of(self.weights.anchor), origin=self.weights.latest.origin)

    def adopted(self, weights: dict[str, Tensor]) -> None:
        """Stop collecting, because an operator or a leader brought these weights, shapes [...] as in the drafter. The
        first such weights become the anchor, later ones do not. Raises AdaptationError if they cannot be stored."""
        if self.collects:
            self.outgrown(weights)

    def rolled_back(self) -> None:
        """Restart collecting if no solution serves any more, because the sums of the last one were dropped."""
        if self.serves_nothing and not self.collects:
            self._sums = self._no_sums()
            self.wanted = _FIRST * self._sums.known

    def training_start(self) -> dict[str, Tensor]:
        """Return the weights that updates start from, shapes [...] as in the drafter: the serving ones, or the last
        solution if no solution serves."""
        if not self.serves_nothing:
            return self.weights.train_from_served()
        return self._solution or weights_of(self.weights.anchor)

    def keep(self, *, always: bool = False) -> bool:
        """Store the sums, unless that would take more than its share of the time. Returns whether they were stored.
        Raises AdaptationError."""
        began = time.monotonic()
        if self._sums is None or not (always or began > self._rests_until):
            return False
        try:
            self._checkpoint.save_tensors("sums", self._sums.tensors(), origin=self.weights.latest.origin)
        finally:  # a full disk is not tried at every call either
            self._rests_until = began + (time.monotonic() - began) / SHARE
        return True

    def state(self) -> State:
        """Serializable state."""
        return {"collects": self.collects, "wanted": self.wanted}

    def restore(self, state: State) -> None:
        """Load what `state` returned. Raises ValueError for anything else, and then changes nothing."""
        collects, wanted = state.get("collects"), state.get("wanted")
        if len(state) != 2 or not isinstance(collects, bool):
            raise ValueError("not a bootstrap state")
        if not isinstance(wanted, int) or self._sums is None or wanted < self._sums.known:
            raise ValueError("bootstrap state does not fit this drafter")
        self.wanted = wanted
        if not collects:
            self._sums = None

    def restore_tensors(self) -> None:
        """Load the stored sums and anchor, if there are any."""
        if not self.makes:
            return
        if self._sums is not None:
            sums = self._sums.tensors()
            for name, value in (self._checkpoint.load_tensors("sums", sums) or {}).items():
                sums[name].copy_(value)
        anchor = weights_of(self.weights.anchor)
        made = self._checkpoint.load_tensors("anchor", anchor)
        if made is None and not self.serves_nothing:
            made = self.weights.train_from_served()
        if made is not None:
            write_weights(self.weights.anchor, made)

    def _no_sums(self) -> InputSums:
        anchor = self.weights.anchor
        return InputSums(anchor.config, anchor.d2t.device)
