"""The stream: real prompts, mixed fairly and always alike, cut where traffic changes."""

import pytest

from service.bench.shift_play import repeated, shifted, turns_of
from service.errors import StartupError
from tests.service.bench.shift_parts import prompt_set

OLD = [prompt_set("few", 3), prompt_set("many", 50, first=100)]
NEW = [prompt_set("new", 20, first=1000)]


def test_a_shift_in_the_middle() -> None:
    stream = shifted(OLD, NEW, 21, seed=4)
    old, new = stream.phases
    assert (old.name, new.name) == ("few + many", "new")
    assert (len(old.prompts), len(new.prompts), stream.new_from, stream.num_queries) == (10, 11, 10, 21)
    assert all(prompt < (1000,) for prompt in old.prompts)
    assert all(prompt >= (1000,) for prompt in new.prompts)
    assert len(set(old.prompts) | set(new.prompts)) == 21


def test_files_have_equal_shares_while_they_last() -> None:
    for queries, few in ((4, 1), (8, 2), (12, 3), (40, 3)):
        old = shifted(OLD, NEW, queries, seed=1).phases[0]
        assert sum(prompt < (100,) for prompt in old.prompts) == few


def test_the_seed_alone_decides() -> None:
    assert shifted(OLD, NEW, 20, seed=1) == shifted(OLD, NEW, 20, seed=1)
    assert shifted(OLD, NEW, 20, seed=1) != shifted(OLD, NEW, 20, seed=2)


def test_every_epoch_is_the_same_mix() -> None:
    stream = repeated([*OLD, *NEW], 24, 4, seed=3)
    assert [phase.name for phase in stream.phases] == ["epoch 1", "epoch 2", "epoch 3", "epoch 4"]
    assert len({phase.prompts for phase in stream.phases}) == 1
    assert (len(stream.phases[0].prompts), stream.num_queries, stream.new_from) == (6, 24, 0)


def test_too_few_prompts_are_refused() -> None:
    with pytest.raises(StartupError, match="new: 25 prompts are needed and there are 20"):
        shifted(OLD, NEW, 50, seed=0)
    with pytest.raises(StartupError, match="give a multiple of --epochs"):
        repeated(OLD, 10, 3, seed=0)


def test_turns_end_where_traffic_changes() -> None:
    stream = shifted(OLD, NEW, 24, seed=0)
    turns = turns_of(stream, 5)
    assert [len(turn.prompts) for turn in turns] == [5, 5, 2, 5, 5, 2]
    assert [turn.phase for turn in turns] == [0, 0, 0, 1, 1, 1]
    assert [turn.first for turn in turns] == [0, 5, 10, 12, 17, 22]
    assert [turn.number for turn in turns] == [turn.window for turn in turns] == list(range(6))
    assert [p for turn in turns for p in turn.prompts] == [p for phase in stream.phases for p in phase.prompts]


def test_windows_hold_whole_turns_of_one_phase() -> None:
    stream = shifted([prompt_set("old", 200)], [prompt_set("new", 200)], 350, seed=0)
    turns = turns_of(stream, 5)
    phases_of = {turn.window: {other.phase for other in turns if other.window == turn.window} for turn in turns}
    assert all(len(phases) == 1 for phases in phases_of.values())
    sizes = [sum(turn.window == window for turn in turns) for window in phases_of]
    assert (min(sizes), max(sizes)) == (3, 5)
    assert list(phases_of) == list(range(len(phases_of)))
