"""What is forgotten of a scope leaves learning with the past answers, between two steps of the engine."""

from dataclasses import replace
from pathlib import Path

import pytest

from service.assembly import Assembly
from service.bench.driver import generate
from service.engine.requests import GenerationRequest, Scope, Submission
from service.errors import StartupError
from tests.service.learning_parts import assembled, built, requests


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(tmp_path_factory.mktemp("target"))


def asked(*keys: str) -> list[GenerationRequest]:
    queries = requests([[5, 6, 7 + number] for number in range(len(keys))], temperature=0.0, tokens=12)
    return [replace(query, scope=Scope(key)) for query, key in zip(queries, keys, strict=True)]


def test_queries_that_wait_or_run_are_forgotten_and_others_are_not(assembly: Assembly, tmp_path: Path) -> None:
    adaptive = built(assembly, tmp_path)
    engine, inbox = adaptive.engine, adaptive.worker.inbox
    for query in asked("a", "b", "a"):
        generate(engine, [query])
    assert [feedback.query.scope for feedback in inbox.queries] == ["a", "b", "a"]
    engine.forget("a")
    assert [feedback.query.scope for feedback in inbox.queries] == ["b"]
    engine.submit(Submission(asked("c")))
    engine.step()
    assert engine.scheduler.running
    engine.forget("c")
    while not engine.idle:
        engine.step()
    assert [feedback.recorded for feedback in inbox.queries] == [True, False]
    generate(engine, asked("a"))
    assert inbox.queries[-1].recorded
    engine.forget(None)
    assert not inbox.queries


def test_texts_are_read_at_the_start_and_the_file_has_one_owner(assembly: Assembly, tmp_path: Path) -> None:
    path = tmp_path / "texts"
    adaptive = built(assembly, tmp_path / "state", replay_file=path)
    for query in asked(*"abcdefgh"):
        generate(adaptive.engine, [query])
    while adaptive.worker.inbox.queries:
        adaptive.learner.observe(adaptive.worker.inbox.queries.popleft())
    adaptive.learner.save(training=True)
    kept = adaptive.learner.feedback.buffers.replay
    assert len(kept) > 0
    assert kept.file is not None
    assert [text.scope for text in kept.file.read()] == [text.scope for text in kept.texts]
    with pytest.raises(StartupError, match="in use by another process"):
        built(assembly, tmp_path / "state", replay_file=path)
    for file in (path, path.with_name("texts.key")):
        assert file.stat().st_mode & 0o777 == 0o600
