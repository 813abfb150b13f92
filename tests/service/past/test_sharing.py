"""What replicas share of past answers through a real Redis, and what they refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from adaptation.config import AdaptationConfig
from adaptation.replicas.wire import sign
from service.past.sharing import AnswerStream, SharedAnswer, SharedAnswers
from tests.redis_server import Redis, redis_cluster, redis_server
from tests.service.past.parts import Server, eventually
from tests.tiny_models import random_prompts

PROMPT, OTHER = random_prompts(2, 20)
SECRET = "shared by all replicas"
GOOD = {"sender": "x", "tokenizer": "t", "scope": "a", "tokens": [1, 2, 3], "num_new": 2}


ON_BOTH = pytest.mark.parametrize("redis", [redis_server, redis_cluster], indirect=True, ids=["server", "cluster"])


@pytest.fixture
def redis(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Redis]:
    with getattr(request, "param", redis_server)(tmp_path) as running:
        yield running


@contextmanager
def replica(
    redis: Redis, *, secret: str = SECRET, knows_earlier: bool = False
) -> Iterator[tuple[Server, SharedAnswers]]:
    server = Server()
    config = AdaptationConfig(redis_url=SecretStr(redis.url), redis_secret=SecretStr(secret))
    vocab = server.engine.target.vocab_size
    stream = AnswerStream(config, tokenizer="t", vocab=vocab, from_start=not knows_earlier)
    shared = SharedAnswers(stream, server.memory, server.thread)
    server.ended.append(shared.finish)
    server.start()
    shared.start()
    try:
        yield server, shared
    finally:
        server.thread.stop()
        assert server.thread.failure is None


def tau(server: Server, prompt: list[int]) -> float:
    """Tokens per step of an answer that is not stored."""
    steps = len(server.steps)
    answer = server.answer(prompt, store=False)
    return len(answer) / (len(server.steps) - steps)


@ON_BOTH
def test_what_one_has_answered_the_other_drafts(redis: Redis) -> None:
    with replica(redis) as (one, sent), replica(redis) as (two, heard):
        assert not two.tree(PROMPT).num_nodes.item()
        before = two.answer(PROMPT, store=False)
        assert one.answer(PROMPT) == before
        eventually(lambda: heard.num_added == 1)
        tree = two.tree(PROMPT)
        assert one.tree(PROMPT).tokens[0, 0] == tree.tokens[0, 0]
        assert before[1] in tree.tokens[0, : tree.num_nodes.item()]
        assert not two.tree(PROMPT, "b").num_nodes.item()
        assert (sent.num_sent, sent.num_added, heard.num_refused) == (1, 0, 0)


def test_tokens_per_step_of_the_other_rise(redis: Redis) -> None:
    with replica(redis) as (one, _), replica(redis) as (two, heard):
        before = tau(two, PROMPT)
        one.answer(PROMPT)
        eventually(lambda: heard.num_added == 1)
        assert tau(two, PROMPT) > 1.5 * before


def test_what_is_not_stored_is_not_sent(redis: Redis) -> None:
    with replica(redis) as (one, sent), replica(redis) as (_, heard):
        one.answer(PROMPT, store=False)
        one.answer(OTHER)
        eventually(lambda: heard.num_added == 1)
        assert sent.num_sent == 1


def test_one_that_starts_later_catches_up_unless_its_file_has(redis: Redis) -> None:
    with replica(redis) as (one, sent):
        one.answer(PROMPT)
        eventually(lambda: sent.num_sent == 1)
        with replica(redis) as (_, late), replica(redis, knows_earlier=True) as (_, kept):
            eventually(lambda: late.num_added == 1 and kept._stream.last not in ("", "0-0"))
            one.answer(OTHER)
            eventually(lambda: late.num_added == 2)
            eventually(lambda: kept.num_added == 1)


@ON_BOTH
@pytest.mark.parametrize("scope", ["a", None])
def test_all_forget_what_one_is_asked_to(redis: Redis, scope: str | None) -> None:
    with replica(redis) as (one, _), replica(redis) as (two, heard):
        one.answer(PROMPT, "a")
        one.answer(PROMPT, "b")
        eventually(lambda: heard.num_added == 2)
        two.forget(scope)
        eventually(lambda: not one.tree(PROMPT, "a").num_nodes.item())
        assert bool(one.tree(PROMPT, "b").num_nodes.item()) is (scope == "a")
        eventually(lambda: redis.client.xlen(redis.key("answers")) == 1)


@pytest.mark.parametrize(
    ("changes", "secret"),
    [
        ({}, "somebody else's secret"),
        ({"tokenizer": "u"}, SECRET),
        ({"tokens": [1, 1 << 19]}, SECRET),
        ({"tokens": [1, -1]}, SECRET),
        ({"tokens": [1, "2"]}, SECRET),
        ({"num_new": 4}, SECRET),
        ({"scope": 3}, SECRET),
        ({"more": 3}, SECRET),
    ],
)
def test_entries_of_strangers_are_dropped_and_counted(redis: Redis, changes: dict[str, object], secret: str) -> None:
    with replica(redis) as (_, heard):
        redis.client.xadd("{adaptree:t}:answers", {"answer": sign("answer", {**GOOD, **changes}, secret.encode())})
        redis.client.xadd("{adaptree:t}:answers", {"other": b"x"})
        redis.client.xadd("{adaptree:t}:answers", {"answer": sign("query", GOOD, SECRET.encode())})
        redis.client.xadd("{adaptree:t}:answers", {"answer": sign("answer", GOOD, SECRET.encode())})
        eventually(lambda: heard.num_added == 1)
        assert heard.num_refused == 3


@ON_BOTH
def test_a_lost_server_costs_sharing_only(redis: Redis) -> None:
    with replica(redis) as (one, sent), replica(redis) as (_, heard):
        redis.kill()
        assert one.answer(PROMPT)
        eventually(lambda: sent.is_lost)
        redis.begin()
        one.answer(OTHER)
        eventually(lambda: heard.num_added >= 1)


def test_an_entry_that_breaks_is_left_out_and_the_thread_goes_on(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    add, failures = SharedAnswers._apply, [LookupError("planted")]

    def broken(shared: SharedAnswers, answer: SharedAnswer) -> None:
        if failures:
            raise failures.pop()
        add(shared, answer)

    monkeypatch.setattr(SharedAnswers, "_apply", broken)
    with replica(redis) as (one, sent), replica(redis) as (two, heard):
        for number, prompt in enumerate((PROMPT, OTHER), start=1):
            one.answer(prompt)
            eventually(lambda number=number: sent.num_sent == number)  # type: ignore[misc]
        eventually(lambda: heard.num_added == 1)
        assert two.engine.guard.errors == {"sharing": 1}
        monkeypatch.setattr(SharedAnswers, "step", lambda _: [].pop())
        eventually(lambda: set(two.engine.guard.switched_off) == {"sharing"})
        assert two.engine.guard.errors == {"sharing": 4}
        assert len(two.answer(PROMPT)) == 32
