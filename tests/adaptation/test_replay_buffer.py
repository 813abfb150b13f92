"""What the replay buffer keeps, in which order it trains on it, what a restart keeps of it, and what is forgotten."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaptation.records import NotStored
from adaptation.replay_buffer import KeptText, ReplayBuffer, ReplayFile, num_bytes
from adaptation.samples import ValidationText, example_of
from drafters.feedback import QueryFeedback
from drafters.training.corpus import Example
from tests.adaptation.crashing import disk_full_after
from tests.adaptation.samples import ANSWER, PROMPT, Bench, bench, feedback

KEY = b"k" * 32
BELONGS = {"target": "t", "drafter": "d", "names of clients": "n"}


def asked(seed: int, *, steps: int = ANSWER, client: str = "a", scope: str = "", store: bool = True) -> QueryFeedback:
    """A query that took so many steps."""
    heard = feedback(seed, client=client, accepted=(0,) * steps, store=store)
    return replace(heard, query=replace(heard.query, scope=scope))


def add(buffer: ReplayBuffer, heard: QueryFeedback) -> Example:
    text = example_of(heard)
    assert text is not None
    return buffer.add(text, heard.query)


def buffer_for(texts: int, share: float = 1.0) -> ReplayBuffer:
    """With room for so many texts."""
    text = add(ReplayBuffer(1 << 30, client_share=1.0), asked(0))
    return ReplayBuffer(texts * num_bytes(text), client_share=share)


def same(left: KeptText, right: KeptText) -> bool:
    """Equal to the last bit."""
    for one, other in ((left, right), (left.example, right.example)):
        for name in (field.name for field in fields(one) if field.name != "example"):
            found, expected = getattr(one, name), getattr(other, name)
            is_same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
            if not is_same or (isinstance(found, Tensor) and found.dtype != expected.dtype):
                return False
    return True


def test_the_text_of_least_value_makes_room_and_the_oldest_among_equals() -> None:
    buffer = buffer_for(3)
    for seed, steps in enumerate((8, 4, 16, 4, 4, 12)):
        add(buffer, asked(seed, steps=steps))
        assert buffer.num_bytes == sum(num_bytes(text.example) for text in buffer.texts) <= buffer._max_bytes
    assert [text.value for text in buffer.texts] == [8, 16, 12]
    add(buffer, asked(9, steps=1))
    assert [text.value for text in buffer.texts] == [8, 16, 12]


def test_a_client_whose_texts_are_most_valuable_keeps_no_more_than_its_share() -> None:
    buffer = buffer_for(8, share=0.25)
    for seed in range(40):
        add(buffer, asked(2 * seed, client="greedy"))
        add(buffer, asked(2 * seed + 1, client=f"honest {seed % 4}", steps=4))
    clients = [text.client for text in buffer.texts]
    assert (len(clients), clients.count("greedy")) == (8, 2)


def test_a_pass_is_in_the_order_of_value_and_goes_on_where_it_was_interrupted() -> None:
    buffer = buffer_for(9)
    texts = {id(add(buffer, asked(steps, steps=steps))): steps for steps in (3, 9, 5, 7, 1)}

    def taken(count: int) -> list[int]:
        return [texts[id(text)] for text in buffer.take(count)]

    assert taken(2) == [9, 7]
    assert taken(2) == [5, 3]
    buffer.put_back()
    assert taken(2) == [5, 3]
    texts[id(add(buffer, asked(8, steps=8)))] = 8
    assert taken(3) == [8, 1, 9], "a new one joins the pass"
    buffer.drop_taken()
    assert taken(9) == [7, 5, 3]


def test_a_kept_text_is_cut_to_what_is_trained_on_and_has_memory_of_its_own() -> None:
    heard = asked(0)
    text = example_of(heard)
    assert text is not None
    window = text.features.untyped_storage().nbytes()
    kept = add(buffer_for(1), heard)
    assert kept.features.untyped_storage().nbytes() == kept.features.nbytes <= window
    assert (kept.prompt, kept.memory, kept.features.dtype) == (PROMPT, None, text.features.dtype)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "texts"


def written(path: Path, count: int = 4) -> ReplayBuffer:
    """A buffer that was written when half of a pass was done."""
    buffer = buffer_for(count)
    for seed in range(count):
        add(buffer, asked(seed, steps=seed + 1, scope=f"scope {seed % 2}"))
    buffer.take(count // 2)
    path.parent.mkdir(exist_ok=True)
    ReplayFile(path, KEY, BELONGS).write(buffer.texts, buffer.num_changes)
    return buffer


def test_a_later_process_goes_on_with_the_pass(path: Path) -> None:
    before, after = written(path), buffer_for(4)
    assert path.stat().st_mode & 0o777 == 0o600
    after.restore(ReplayFile(path, KEY, BELONGS).read())
    assert all(map(same, after.texts, before.texts))
    assert [text.passes for text in after.texts] == [0, 0, 1, 1]
    for old, new in zip(before.take(3), after.take(3), strict=True):
        assert torch.equal(old.features, new.features)
    smaller = buffer_for(2)
    smaller.restore(ReplayFile(path, KEY, BELONGS).read())
    assert [text.value for text in smaller.texts] == [3, 4], "the bound is that of the process"


def no_file(path: Path) -> None:
    path.write_bytes(b"something else\n" * 100)


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "differs", "message"),
    [
        (lambda path: None, {"target": "other"}, "it was written with another target; name another file"),
        (lambda path: None, {"drafter": "other"}, "it was written with another drafter"),
        (lambda path: None, {"names of clients": "other"}, "it was written with another names of clients"),
        (no_file, {}, "it is not a file of texts to train on"),
        (shorter, {}, "it is damaged"),
        (changed, {}, "it is damaged, or was written with another key"),
    ],
)
def test_a_file_of_others_is_refused(
    path: Path, spoil: Callable[[Path], None], differs: dict[str, str], message: str
) -> None:
    written(path)
    spoil(path)
    with pytest.raises(ValueError, match=message):
        ReplayFile(path, KEY, BELONGS | differs).read()
    assert path.exists()


def test_a_full_disk_keeps_the_old_file_unless_something_was_forgotten(path: Path) -> None:
    buffer, file = written(path), ReplayFile(path, KEY, BELONGS)
    content = path.read_bytes()
    for forgot in (False, True):
        with disk_full_after(100), pytest.raises(NotStored):
            file.write(buffer.texts, buffer.num_changes, forgot=forgot)
        assert not file.is_due(buffer.num_changes), "it rests after a failure"
        assert path.exists() is not forgot
        assert forgot or path.read_bytes() == content


def learning(folder: Path, file: ReplayFile, **knobs: object) -> Bench:
    tried = bench(folder, policy="full_only", full_queries=100, idle_share=0.0, **knobs)
    tried.buffers.replay.file = file
    return tried


def test_what_is_forgotten_is_gone_everywhere_at_once_and_the_rest_stays(path: Path) -> None:
    path.parent.mkdir()
    file = ReplayFile(path, KEY, BELONGS)
    both, rest = (learning(path.parent / name, file) for name in ("both", "rest"))
    for tried in (both, rest):
        tried.learner.feedback.validation._rng.seed(1)
        for seed in range(24):
            scope = "b" if seed % 3 else "a"
            tried.learner.observe(asked(seed, scope=scope, store=seed < 20))
    for tried in (both, rest):
        number = len(tried.buffers.replay)
        tried.learner.save(training=True)
        assert len(file.read()) == number, "without texts of queries that must not be stored"
    assert number < 20
    both.learner.forget("a")
    buffers, validation = both.buffers, both.learner.feedback.validation
    texts: list[ValidationText] = [*validation.texts, *both.publisher.distance._texts]
    scopes = [*(one.scope for one in buffers.replay.texts), *(one.scope for _, one in buffers._waiting)]
    assert {*scopes, *(text.scope for text in texts)} == {"b"}
    kept = [text for text in rest.buffers.replay.texts if text.scope == "b"]
    assert len(kept) == len(buffers.replay) == len(file.read()) > 0
    assert all(map(same, buffers.replay.texts, kept))
    assert all(map(same, file.read(), kept))
    both.learner.forget(None)
    assert not any((buffers.replay, buffers._waiting, validation.texts, file.read()))
