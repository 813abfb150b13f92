"""How large the steps of updates are: the gate answers each one, and the arm's next is bolder or more careful.

Far from the traffic large steps teach more; close to it they take a trained drafter away from all that it knows. Which
of the two it is nobody knows before a candidate has been judged. Knows neither gate nor optimizer.
"""

from adaptation.policy import ARMS, Arm

_MORE = 1.25
_LESS = 0.7
_FIRST = 0.5
_LEAST = 0.25


class Pace:
    """Each arm's share of its learning rate."""

    def __init__(self) -> None:
        self._shares = dict.fromkeys(ARMS, _FIRST)

    def share(self, arm: Arm) -> float:
        """Of the rate, above 0 and at most 1."""
        return self._shares[arm]

    def published(self, arm: Arm) -> None:
        self._shares[arm] = min(1.0, self._shares[arm] * _MORE)

    def clearly_worse(self, arm: Arm) -> None:
        self._shares[arm] = max(_LEAST, self._shares[arm] * _LESS)

    def traffic_changed(self) -> None:
        """What is served may be far from it."""
        self._shares = dict.fromkeys(ARMS, 1.0)
