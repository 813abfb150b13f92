"""The drafter that proposes nothing: plain decoding through the very same step. Keeps no state."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from drafters.protocol import Committed, DraftContext, Noise, RankOutcomes, Read
from drafters.tree import Candidates, DraftTree


class NoDrafter:
    """Grows the empty tree for everyone."""

    name = "none"
    version = 0
    wants_scores = False
    num_blocks = 0

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return ()

    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Nothing to begin."""

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        return DraftTree.empty(rows.shape[0], rows.device)

    def read(self, read: Read) -> None:
        """Prompts are known from `start`."""

    def commit(self, committed: Committed) -> None:
        """Nothing to learn."""

    def finish(self, rows: Sequence[int]) -> list[int]:
        return [0] * len(rows)

    def credits(self) -> Mapping[str, int]:
        return {}

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes()

    def trainable(self) -> nn.Module | None:
        return None
