"""What is kept of past answers over restarts, kills, full disks and files of others."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from service.errors import StartupError
from service.past import file as module
from service.past.file import AnswersFile, MemoryFile, key_beside
from tests.adaptation.crashing import disk_full_after
from tests.service.past.parts import SIZES, Server, eventually, same, serving
from tests.tiny_models import random_prompts

PROMPT, OTHER = random_prompts(2, 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "past"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that has answered."""
    folder = tmp_path_factory.mktemp("kept")
    with serving(folder / "past") as server:
        server.answer(PROMPT)
    return folder


@pytest.fixture
def filled(kept: Path, tmp_path: Path) -> Path:
    """A copy of its file, beside the key."""
    return copytree(kept, tmp_path / "filled") / "past"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(module, "_BYTES_PER_SECOND", 1 << 40)


def test_trees_after_a_restart_are_those_before(path: Path) -> None:
    with serving(path) as server:
        server.answer(PROMPT, "a")
        server.answer(OTHER, "b")
        before = server.tree(PROMPT, "a"), server.tree(OTHER, "b")
        assert all(tree.num_nodes.item() for tree in before)
    with serving(path) as server:
        assert same(server.tree(OTHER, "b"), before[1])
        assert same(server.tree(PROMPT, "a"), before[0])
        assert not server.tree(PROMPT, "b").num_nodes.item()
    for kept in (path, path.with_name("past.key")):
        assert kept.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(path.parent)) == ["past", "past.key"]


def test_it_is_written_while_the_engine_runs(path: Path) -> None:
    with serving(path) as server:
        server.answer(PROMPT)
        eventually(path.exists)
        content = path.read_bytes()
        server.answer(OTHER, store=False)
        server.answer(OTHER)
        eventually(lambda: path.read_bytes() != content)


def test_what_is_new_or_forgotten_before_the_file_is_read_stays_so(path: Path) -> None:
    with serving(path) as server:
        server.answer(PROMPT, "a")
        server.answer(PROMPT, "b")
    server = Server()
    file = MemoryFile(AnswersFile(path, server.memory, tokenizer="t", names=b"n"), server.memory, server.thread)
    server.ended.append(file.finish)
    server.start()
    server.answer(OTHER, "b")
    new = server.tree(OTHER, "b")
    server.forget("a")
    file.start()
    eventually(lambda: file._is_read)
    assert server.tree(OTHER, "b").tokens.tolist() == new.tokens.tolist()
    assert server.tree(PROMPT, "b").num_nodes.item()
    assert not server.tree(PROMPT, "a").num_nodes.item()
    server.thread.stop()


def test_what_is_forgotten_leaves_the_file_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path) as server:
        server.answer(PROMPT, "a")
        server.answer(OTHER, "b")
    full = path.read_bytes()
    monkeypatch.setattr(module, "_LEAST_PAUSE_SECONDS", 3600.0)
    with serving(path) as server:
        words = server.memory.past.by_scope()[0].entries.clone()
        assert words.any()
        assert words.numpy().tobytes() in full
        server.forget("a")
        eventually(lambda: path.read_bytes() != full)
        assert words.numpy().tobytes() not in path.read_bytes()
        assert server.tree(OTHER, "b").num_nodes.item()
    with serving(path) as server:
        assert not server.tree(PROMPT, "a").num_nodes.item()
        assert server.tree(OTHER, "b").num_nodes.item()


def test_what_cannot_be_rewritten_without_what_was_forgotten_goes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(path) as server:
        server.answer(PROMPT)
        eventually(path.exists)
        monkeypatch.setattr(module, "_LEAST_PAUSE_SECONDS", 3600.0)
        with disk_full_after(10):  # bytes, of a file without any share
            server.forget(None)
            eventually(lambda: not path.exists())


def test_a_share_that_begins_again_while_it_is_copied_is_left_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words could be those of another scope."""
    with serving(path, replace(SIZES, owners=1)) as server:
        server.answer(PROMPT)
        (past,) = server.memory.past.by_scope()
        monkeypatch.setattr(server.memory.past, "is_current", lambda one: False)
        path.unlink(missing_ok=True)
        server.answer(OTHER)
    assert past.entries.any()
    with serving(path, replace(SIZES, owners=1)) as server:
        assert server.memory.past.by_scope() == []


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "it is not a file of past answers"),
        (lambda data: b"a letter to somebody\n" * 9, "it is not a file of past answers"),
        (lambda data: b"[" * 100_000, "it is not a file of past answers"),
        (lambda data: data[: len(data) // 2], "it is damaged"),
        (lambda data: data[:-1], "it is damaged"),
        (lambda data: data + b"\0", "it is damaged"),
        (lambda data: data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:], "it is damaged"),
        (lambda data: data.replace(b'"format": 1', b'"format": 0', 1), "it was written with another format"),
    ],
)
def test_a_file_that_cannot_be_used_is_set_aside(
    filled: Path, damage: Callable[[bytes], bytes], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = damage(filled.read_bytes())
    filled.write_bytes(data)
    with serving(filled) as server:
        assert not server.tree(PROMPT).num_nodes.item()
        assert reason in caplog.text
        assert filled.with_name("past.set-aside").read_bytes() == data


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"tokenizer": "u"}, "another tokenizer"),
        ({"names": b"m"}, "another names"),
        ({"sizes": replace(SIZES, num_bytes=1 << 21)}, "another sizes"),
    ],
)
def test_a_file_that_does_not_fit_is_set_aside(
    filled: Path, other: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(filled, **other) as server:
        assert reason in caplog.text
        assert filled.with_name("past.set-aside").exists()
        server.answer(PROMPT)
    with serving(filled, **other) as server:
        assert server.tree(PROMPT).num_nodes.item()


def test_another_key_opens_nothing(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled.with_name("past.key").unlink()
    with serving(filled):
        assert "ignoring past answers" in caplog.text


def test_a_full_disk_is_logged_once_and_leaves_what_was_there(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(path) as server:
        server.answer(PROMPT)
    content = path.read_bytes()
    with serving(path) as server:
        with disk_full_after(1000):
            answers = [server.answer(OTHER), server.answer(OTHER)]
            time.sleep(0.3)
            lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert ["cannot be saved" in record.getMessage() for record in lines] == [True]
            assert path.read_bytes() == content
            assert sorted(os.listdir(path.parent)) == ["past", "past.key"]
        assert answers[0] == answers[1]
        eventually(lambda: path.read_bytes() != content)


def test_keys_that_are_gone_make_room(path: Path) -> None:
    with serving(path) as server:
        server.answer(PROMPT, "a")
        server.answer(PROMPT, "b")
    with serving(path) as server:
        server.answer(PROMPT, "b")
        server.answer(OTHER, "c")
        assert server.tree(OTHER, "c").num_nodes.item()
        assert [past.scope for past in server.memory.past.by_scope()] == ["b", "c"]


def test_whatever_kills_leave_is_used_and_a_file_in_use_waited_for(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    command = [sys.executable, "-m", "tests.service.past.kept", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline()
            file = MemoryFile(AnswersFile(path, server.memory, tokenizer="t", names=b"n"), server.memory, server.thread)
            server.start()
            file.start()
            eventually(lambda: "waiting until it ends" in caplog.text)
            assert not server.tree(PROMPT).num_nodes.item()
        finally:
            other.send_signal(signal.SIGKILL)
    eventually(lambda: file._is_read)
    assert server.tree(PROMPT).num_nodes.item()
    server.thread.stop()
    file.finish()


def test_a_key_that_is_none_is_refused(path: Path) -> None:
    key = key_beside(path)
    assert key_beside(path) == key
    path.with_name("past.key").write_bytes(b"short")
    with pytest.raises(StartupError, match="does not hold a key of 32 bytes"):
        key_beside(path)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be read"):
        key_beside(tmp_path / "file" / "past")


def test_a_write_that_breaks_is_tried_again_and_then_given_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that were forgotten do not stay in a file that is not written any more."""
    write, failures = AnswersFile.write, [LookupError("planted")] * 2

    def broken(file: AnswersFile, *args: Any) -> int:
        if failures:
            raise failures.pop()
        return write(file, *args)

    monkeypatch.setattr(AnswersFile, "write", broken)
    with serving(path) as server:
        guard = server.engine.guard
        server.answer(PROMPT)
        eventually(path.exists)
        assert (guard.errors, guard.switched_off) == ({"memory_file": 2}, {})
        failures += [LookupError("planted")] * 9
        server.answer(OTHER)
        eventually(lambda: set(guard.switched_off) == {"memory_file"})
        assert path.exists()
        server.thread.forget("a")
        eventually(lambda: not path.exists())
        assert guard.errors == {"memory_file": 5}


def test_a_file_that_cannot_be_read_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswersFile, "check", lambda *_: [].pop())
    server = Server()
    file = MemoryFile(AnswersFile(path, server.memory, tokenizer="t", names=b"n"), server.memory, server.thread)
    path.touch()
    server.start()
    file.start()
    eventually(lambda: set(server.engine.guard.switched_off) == {"memory_file"})
    assert len(server.answer(PROMPT)) == 32
    server.thread.stop()
    file.finish()
