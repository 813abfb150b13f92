"""The network that drafts together with the memory, and when it runs."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from drafters import readback
from drafters.gating import AskGate
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import Candidates


class GatedNetwork:
    """A drafter that runs in a step only if the tokens that it adds to the memory's tree are expected to save more
    time than it takes (`AskGate`), and that stops reading texts while it does not pay."""

    def __init__(self, drafter: Drafter, sizes: DraftingSizes) -> None:
        self.drafter = drafter
        self.tokens = {"memory": 0, drafter.name: 0}  # accepted so far, by who proposed them
        self._gate = AskGate(drafter.name, sizes.ledger)
        self._survivals = readback.readback_of(sizes.device)
        self._expected = 0.0  # accepted tokens per sequence, by the last memory's tree that was read back
        self._ran = False  # in this step
        self._follows = True  # reads texts

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin to read these sequences, if the ledger covers the time for a whole text."""
        if contexts:  # a text that it has not read from its beginning tells it too little
            warm = any(context.warm for context in contexts)
            self._follows = self.drafter.ready and self._gate.affords_text(warm=warm)
        self.drafter.start(contexts)

    def read(self, read: Read) -> None:
        """Take in a chunk of a prompt."""
        self.drafter.read(read if self._follows else replace(read, follow=False))

    def propose(self, rows: Tensor, noise: Noise, survival: Tensor) -> Candidates | None:
        """The network's candidates, if it runs in this step. # rows [batch] int64; survival [batch, nodes], of the
        memory's tree"""
        if not self.drafter.ready:
            return None
        batch = rows.shape[0]
        self._gate.begin(batch, warm=noise.warm)
        self._survivals.read(survival.sum()[None] / max(1, batch), self._observe_expected)
        self._ran = self._gate.ask(self._expected, can_answer=self._follows)
        return self.drafter.grow(rows, noise) if self._ran else None

    def end_step(self) -> Observe | None:
        """Call once per step when its tokens are committed. Returns what takes the tokens that only the network had
        right and the number of committed tokens, as soon as they are known; None if it did not run."""
        observe, self._ran = self._gate.end() if self._ran else None, False
        return observe

    def commit(self, committed: Committed) -> None:
        """Take in a step's committed tokens."""
        self._follows = self._follows and self._gate.promises
        self.drafter.commit(committed if self._follows else replace(committed, follow=False))

    def credit(self, alone: int, accepted: int, committed: int, observe: Observe | None) -> None:
        """Credit the network with the accepted tokens that the memory's own tree did not have.
        `alone`: accepted tokens that the memory's own tree had; `observe`: as returned by `end_step`."""
        extra = max(0, accepted - alone) if observe is not None else 0
        self.tokens["memory"] += accepted - extra
        self.tokens[self.drafter.name] += extra
        if observe is not None:
            observe((extra, committed))

    def timed(self, times: StepTimes) -> None:
        """Take in what the step took."""
        self._gate.took(times, followed=self._follows)
        self.drafter.timed(times)

    def renew(self) -> None:
        """The network's weights have changed."""
        self._gate.renew()
        self._follows = self.drafter.ready
        self.drafter.renew()

    def _observe_expected(self, expected: Sequence[float]) -> None:
        (self._expected,) = expected
