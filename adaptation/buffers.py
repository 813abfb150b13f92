"""Where lessons wait for an update, and texts that are never learnt from wait to judge one.

Both are bounded: the oldest make room and are counted. Knows neither policy nor drafter.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adaptation.policy import ARMS, Arm
from adaptation.signal import Lesson
from drafters.training.corpus import Example

_HURRIED_SHARE = 0.5


class LessonBuffers:
    """One queue of lessons per arm, bounded by the rejected positions in all of them and by the lessons of each.

    Full updates hear some of the latest lessons again, whatever those were for: what a few texts teach fits only them.
    """

    def __init__(
        self,
        *,
        most_positions: int,
        most_lessons: Mapping[Arm, int],
        rehearsed: int,
        update_lessons: int,
        rng: random.Random,
    ) -> None:
        """`rehearsed`: latest lessons that are kept to be heard again; `update_lessons`: as many as a full update has
        time for, so that `rng` draws from them what new ones leave room for."""
        self.num_dropped = 0  # lessons
        self._most_lessons = most_lessons
        self._most_positions = most_positions
        self._waiting: deque[tuple[Arm, Lesson]] = deque()
        self._rehearsed: deque[Lesson] = deque(maxlen=rehearsed)
        self._update_lessons = update_lessons
        self._rng = rng

    @property
    def positions(self) -> int:
        return sum(lesson.num_rejected for _, lesson in self._waiting)

    def count(self, arm: Arm) -> int:
        return sum(name == arm for name, _ in self._waiting)

    def remember(self, lesson: Lesson) -> None:
        """Let full updates hear it again."""
        self._rehearsed.append(lesson)

    def add(self, arm: Arm, lesson: Lesson) -> None:
        """A head update needs no text, so none is kept for it."""
        self._waiting.append((arm, replace(lesson, example=None) if arm == "head" else lesson))
        if self.count(arm) > self._most_lessons[arm]:
            self._drop(next(place for place, (name, _) in enumerate(self._waiting) if name == arm))
        while self.positions > self._most_positions:
            self._drop(0)

    def take(self, arm: Arm) -> list[Lesson]:
        """All that waits for this arm, oldest first, behind what it hears again; it waits no longer."""
        taken = [lesson for name, lesson in self._waiting if name == arm]
        self._waiting = deque((name, lesson) for name, lesson in self._waiting if name != arm)
        if arm == "head":
            return taken
        others = [lesson for lesson in self._rehearsed if not any(lesson is new for new in taken)]
        room = max(0, self._update_lessons - len(taken))
        return self._rng.sample(others, min(room, len(others))) + taken

    def _drop(self, place: int) -> None:
        del self._waiting[place]
        self.num_dropped += 1

    def forget_heard(self) -> None:
        """Let nothing be heard again: it says nothing of today's texts, or has broken an update."""
        self._rehearsed.clear()

    def clear(self) -> None:
        """The drafter these lessons are about, and that they may have made, is no longer served."""
        self._waiting.clear()
        self._rehearsed.clear()

    def state(self) -> dict[Arm, int]:
        return {arm: self.count(arm) for arm in ARMS}


@dataclass(frozen=True, slots=True)
class HeldBackText:
    """A text that may be replayed, and the number by which its scores are known."""

    number: int
    example: Example


class HeldBack:
    """The most recent texts of a random share of queries.

    When the traffic has changed, only texts from then on can say what is better for it: until there are `enough` of
    them, every second query is held back.
    """

    def __init__(self, *, share: float, enough: int, most: int, rng: random.Random) -> None:
        self._share = share
        self._enough = enough
        self._rng = rng
        self._number = 0
        self._texts: deque[HeldBackText] = deque(maxlen=most)
        self._first_alike = 0  # number of the first text of today's traffic
        self._hurries = False

    @property
    def texts(self) -> Sequence[HeldBackText]:
        return tuple(self._texts)

    @property
    def alike(self) -> Sequence[HeldBackText]:
        """Those of the traffic as it is now."""
        return tuple(text for text in self._texts if text.number >= self._first_alike)

    def traffic_changed(self) -> None:
        self._first_alike = self._number + 1
        self._hurries = True

    def draws(self) -> bool:
        """Whether the next query is held back."""
        self._hurries = self._hurries and len(self.alike) < self._enough
        return self._rng.random() < (max(self._share, _HURRIED_SHARE) if self._hurries else self._share)

    def number(self, example: Example) -> HeldBackText:
        """A text under a number of its own, kept or not."""
        self._number += 1
        return HeldBackText(self._number, example)

    def keep(self, text: HeldBackText) -> None:
        self._texts.append(text)
