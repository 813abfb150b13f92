"""When learning goes over its texts again, while nobody asks."""

import time
from collections.abc import Callable


class IdleTime:
    """A share of it is used, and none any more once updates have led nowhere and no new texts have come."""

    def __init__(self, *, share: float, most_in_vain: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: 0 to 1; `most_in_vain`: updates in a row that nobody interrupted and that published nothing."""
        self._share = share
        self._most_in_vain = most_in_vain
        self._clock = clock
        self._rests_until = 0.0
        self._num_in_vain = 0
        self._num_texts = 0  # that there were at the last update

    def may_begin(self, num_texts: int) -> bool:
        """Whether another update may begin; so many texts were there in all."""
        if num_texts != self._num_texts:
            self._num_texts, self._num_in_vain = num_texts, 0
        return self._share > 0 and self._clock() >= self._rests_until and self._num_in_vain < self._most_in_vain

    def ended(self, seconds: float, *, published: bool | None) -> None:
        """An update has taken so long. `published`: None where somebody asked before it was done."""
        self._rests_until = self._clock() + seconds * (1.0 / self._share - 1.0)
        if published is not None:
            self._num_in_vain = 0 if published else self._num_in_vain + 1
