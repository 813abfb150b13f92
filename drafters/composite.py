"""What a drafter that is made of others reports for all of them."""

from drafters.protocol import Drafter, RankOutcomes


class Composite:
    """The members of `Drafter` that join what all `parts` report. A subclass feeds the parts."""

    parts: tuple[Drafter, ...] = ()

    @property
    def version(self) -> int:
        """The sum of the parts' versions: it changes with each of them."""
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
        """Whether any part reads prompts."""
        return any(part.reads_prompts for part in self.parts)

    @property
    def wants_scores(self) -> bool:
        """Whether any part wants the target's logits."""
        return any(part.wants_scores for part in self.parts)

    @property
    def num_blocks(self) -> int:
        """Blocks drafted so far by all parts."""
        return sum(part.num_blocks for part in self.parts)

    def rank_outcomes(self) -> RankOutcomes:
        """Return the outcomes of all parts' rank heads, by class; of a class that two parts have, the later one's."""
        outcomes = [part.rank_outcomes() for part in self.parts]
        predicted = {label: value for one in outcomes for label, value in one.predicted.items()}
        return RankOutcomes(predicted, {label: value for one in outcomes for label, value in one.right.items()})
