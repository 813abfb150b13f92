"""Whether a costly drafter follows the texts, prompts and answers, or sleeps.

Following costs time in every step, asked or not. So a drafter that is seldom asked where trees are drafted, because
others do better, sleeps; now and then it wakes for a while, for without having followed a text it could not show what
it is worth. (Where no trees are drafted at all the engine says what is worth following.) A matter of speed only.
"""

_RATE = 1 / 16
_SELDOM = 0.1  # of recent steps with trees; trials of what does not pay are rarer
_PERIOD = 1024  # steps with trees
_AWAKE = 128  # of each period, come what may


class Sleep:
    """Steps with trees, and how many of the recent ones the drafter was asked in."""

    def __init__(self) -> None:
        self._asked = 1.0
        self._num_steps = 0

    @property
    def is_awake(self) -> bool:
        return self._asked > _SELDOM or self._num_steps % _PERIOD >= _PERIOD - _AWAKE

    def step(self, *, asked: bool) -> None:
        """A step with trees has ended."""
        self._num_steps += 1
        self._asked += _RATE * (asked - self._asked)
