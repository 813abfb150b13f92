"""What a drafter that is made of others reports for all of them."""

from drafters.protocol import Drafter, RankOutcomes


class CompositeDrafter(Drafter):
    """A drafter made of `parts`, which it feeds. A subclass says which of them drafts."""

    parts: tuple[Drafter, ...] = ()

    @property
    def version(self) -> int:
        return sum(part.version for part in self.parts)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The layers of the first part, then those that only later parts tap."""
        layers: tuple[int, ...] = ()
        for part in self.parts:
            layers = (*layers, *[layer for layer in part.tap_layers if layer not in layers])
        return layers

    @property
    def reads_prompts(self) -> bool:
        return any(part.reads_prompts for part in self.parts)

    @property
    def wants_scores(self) -> bool:
        return any(part.wants_scores for part in self.parts)

    @property
    def num_blocks(self) -> int:
        return sum(part.num_blocks for part in self.parts)

    def rank_outcomes(self) -> RankOutcomes:
        outcomes = [part.rank_outcomes() for part in self.parts]
        predicted = {label: value for one in outcomes for label, value in one.predicted.items()}
        return RankOutcomes(predicted, {label: value for one in outcomes for label, value in one.right.items()})
