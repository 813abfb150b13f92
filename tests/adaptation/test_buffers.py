import random
from collections import deque
from collections.abc import Mapping

import torch

from adaptation.buffers import HeldBack, LessonBuffers
from adaptation.policy import ARMS, Arm
from adaptation.signal import Lesson
from tests.adaptation.lessons import lessons

torch.set_num_threads(1)


def buffers_of(
    most_positions: int, most_lessons: Mapping[Arm, int], *, rehearsed: int, update_lessons: int = 9
) -> LessonBuffers:
    return LessonBuffers(
        most_positions=most_positions,
        most_lessons=most_lessons,
        rehearsed=rehearsed,
        update_lessons=update_lessons,
        rng=random.Random(0),
    )


def test_the_oldest_lessons_make_room_and_are_counted() -> None:
    rng, buffers = (
        random.Random(0),
        buffers_of(40, {"head": 100, "full": 100}, rehearsed=0),
    )
    kept: deque[tuple[Arm, Lesson]] = deque()
    dropped = 0
    for lesson in lessons(12):
        arm = rng.choice(ARMS)
        buffers.add(arm, lesson)
        kept.append((arm, lesson))
        while sum(one.num_rejected for _, one in kept) > 40:
            kept.popleft()
            dropped += 1
        assert buffers.positions == sum(one.num_rejected for _, one in kept) <= 40
    assert buffers.num_dropped == dropped > 0
    for arm in ARMS:
        expected = [one.signal for name, one in kept if name == arm]
        assert [one.signal for one in buffers.take(arm)] == expected
        assert buffers.count(arm) == 0


def test_an_arm_keeps_its_newest_lessons() -> None:
    buffers = buffers_of(10_000, {"head": 2, "full": 3}, rehearsed=0)
    given = lessons(5)
    for lesson in given:
        for arm in ARMS:
            buffers.add(arm, lesson)
    assert buffers.num_dropped == 5
    assert [one.signal for one in buffers.take("head")] == [one.signal for one in given[3:]]
    assert [one.signal for one in buffers.take("full")] == [one.signal for one in given[2:]]


def test_only_full_updates_keep_texts() -> None:
    buffers = buffers_of(100, {"head": 100, "full": 100}, rehearsed=0)
    (lesson,) = lessons(1)
    for arm in ARMS:
        buffers.add(arm, lesson)
    assert [one.example is None for one in buffers.take("head")] == [True]
    assert [one.example is lesson.example for one in buffers.take("full")] == [True]


def test_full_updates_hear_the_latest_lessons_again() -> None:
    buffers = buffers_of(10_000, {"head": 9, "full": 9}, rehearsed=4)
    given = lessons(7)
    signals = [lesson.signal for lesson in given]

    def heard(first: int, end: int, arm: Arm = "full") -> list[float]:
        for lesson in given[first:end]:
            buffers.remember(lesson)
            buffers.add(arm, lesson)
        *again, newest = (lesson.signal for lesson in buffers.take(arm))
        return [*sorted(again, key=signals.index), newest]

    assert heard(0, 2) == signals[:2]
    assert heard(2, 4) == signals[:4]
    assert heard(4, 5) == signals[1:5]
    assert heard(0, 2, "head") == signals[:2]
    assert buffers.count("full") == 0
    buffers.forget_heard()
    assert heard(5, 6) == signals[5:6]
    buffers.clear()
    assert heard(6, 7) == signals[6:7]


def test_what_is_heard_again_is_drawn_for_each_update_and_leaves_room_for_new_lessons() -> None:
    given = lessons(12)
    buffers = buffers_of(10_000, {"head": 9, "full": 9}, rehearsed=8, update_lessons=4)
    for lesson in given[:8]:
        buffers.remember(lesson)
    drawn = set()
    for lesson in given[8:]:
        buffers.add("full", lesson)
        *again, newest = buffers.take("full")
        assert newest is lesson
        assert len({id(one) for one in again}) == 3
        drawn |= {one.signal for one in again}
    assert len(drawn) > 3
    for lesson in given[:6]:
        buffers.add("full", lesson)
    assert len(buffers.take("full")) == 6, "new ones are heard even when there are more than fit"


def test_a_lesson_keeps_the_version_it_is_about() -> None:
    buffers = buffers_of(100, {"head": 100, "full": 100}, rehearsed=0)
    for version, lesson in enumerate(lessons(3)):
        buffers.add("head", Lesson(version, lesson.signal, lesson.num_rejected, lesson.marks, None))
    assert [lesson.version for lesson in buffers.take("head")] == [0, 1, 2]


def test_a_share_is_held_back_and_the_newest_are_kept() -> None:
    held_back = HeldBack(share=0.2, enough=2, most=3, rng=random.Random(0))
    drawn = sum(held_back.draws() for _ in range(5000))
    assert 0.18 * 5000 < drawn < 0.22 * 5000
    texts = [held_back.number(lesson.example) for lesson in lessons(5) if lesson.example is not None]
    for text in texts:
        held_back.keep(text)
    assert list(held_back.texts) == texts[-3:]
    assert len({text.number for text in texts}) == 5


def test_texts_from_before_a_change_judge_no_more_and_others_are_soon_held_back() -> None:
    held_back = HeldBack(share=0.1, enough=2, most=8, rng=random.Random(0))
    texts = [held_back.number(lesson.example) for lesson in lessons(4) if lesson.example is not None]
    for text in texts:
        held_back.keep(text)
    assert list(held_back.alike) == texts
    held_back.traffic_changed()
    assert (len(held_back.texts), held_back.alike) == (4, ())
    assert 0.4 < sum(held_back.draws() for _ in range(1000)) / 1000 < 0.6
    newer = [held_back.number(lesson.example) for lesson in lessons(2) if lesson.example is not None]
    for text in newer:
        held_back.keep(text)
    assert list(held_back.alike) == newer
    assert sum(held_back.draws() for _ in range(1000)) / 1000 < 0.2
