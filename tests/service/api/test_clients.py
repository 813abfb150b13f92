"""Under which name a client's share is counted."""

from pathlib import Path
from typing import Any

import pytest

from adaptation.config import AdaptationConfig
from service.api.schemas import CompletionRequest
from service.api.settings import client_name
from service.config import ServiceConfig
from service.serve import api_settings
from tests.service.api.client import ASK, client_of
from tests.service.scripted import ScriptedEngine, say

SECRET = b"of this process"


def scope(address: str | None = "10.0.0.1", authorization: str | None = None, port: int = 1) -> dict[str, Any]:
    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    return {"type": "http", "headers": headers, "client": None if address is None else (address, port)}


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt="x", **fields)


def test_the_key_counts_where_keys_are_checked() -> None:
    def name(key: str, address: str = "a", **fields: Any) -> str:
        return client_name(SECRET, scope(address, key), body(**fields), by_api_key=True)

    assert name("Bearer one") == name("bearer  one ") == name("Bearer one", "b", user="u", safety_identifier="s")
    assert name("Bearer one") != name("Bearer two")


def test_users_count_where_they_are_named() -> None:
    def name(address: str = "a", key: str | None = None, **fields: Any) -> str:
        return client_name(SECRET, scope(address, key), body(**fields), by_api_key=False)

    assert name(user="u") == name("b", user="u") == name(safety_identifier="u") == name(key="Bearer k", user="u")
    assert name(safety_identifier="s", user="u") == name(safety_identifier="s", user="v")
    assert len({name(user="u"), name(user="v"), name(), name("b")}) == 4
    assert name(user="") == name()


def test_the_address_counts_last_and_ports_do_not() -> None:
    assert client_name(SECRET, scope(port=1), body(), by_api_key=False) == client_name(
        SECRET, scope(port=2), body(), by_api_key=False
    )
    assert client_name(SECRET, scope(None), body(), by_api_key=False) != client_name(
        SECRET, scope("a"), body(), by_api_key=False
    )


def test_what_a_name_is_made_of_keeps_apart() -> None:
    by_key = client_name(SECRET, scope("x", "Bearer x"), body(), by_api_key=True)
    by_user = client_name(SECRET, scope("x"), body(user="x"), by_api_key=False)
    by_address = client_name(SECRET, scope("x"), body(), by_api_key=False)
    assert len({by_key, by_user, by_address}) == 3


@pytest.mark.parametrize("user", ["ada@example.org", "\ud800"])
def test_a_name_says_nothing_and_holds_for_one_process(user: str) -> None:
    name = client_name(SECRET, scope(), body().model_copy(update={"user": user}), by_api_key=False)
    assert len(name) == 32
    assert set(name) <= set("0123456789abcdef")
    assert name != client_name(b"another", scope(), body().model_copy(update={"user": user}), by_api_key=False)


def test_replicas_with_one_secret_know_a_client_by_one_name(tmp_path: Path) -> None:
    def name(redis_secret: str | None) -> str:
        learning = {"enabled": True, "redis_url": "redis://localhost", "redis_secret": redis_secret}
        config = ServiceConfig(state_dir=tmp_path, adaptation=AdaptationConfig.model_validate(learning))
        key = api_settings(config).naming_key
        assert redis_secret is None or redis_secret.encode() not in key
        return client_name(key, scope("a", "Bearer one"), body(), by_api_key=True)

    shared, other = "a secret of all replicas", "another secret of replicas"
    assert name(shared) == name(shared)
    assert len({name(shared), name(other), name(None), name(None)}) == 4


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/chat/completions", {}), ("/v1/completions", {"prompt": ["a", "b"]})]
)
async def test_every_request_carries_its_client_and_its_wish_not_to_be_learnt_from(
    path: str, fields: dict[str, Any]
) -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine) as client:
        for changes in ({"user": "u"}, {"user": "u", "store": False}, {"user": "v", "store": True}):
            assert (await client.post(path, json={**ASK, **fields, **changes})).status_code == 200
    per_call = len(engine.submitted) // 3
    first, second, third = (engine.submitted[start : start + per_call] for start in range(0, 3 * per_call, per_call))
    assert {request.client for request in first} == {request.client for request in second}
    assert len({request.client for request in (*first, *third)}) == 2
    assert [{request.store for request in group} for group in (first, second, third)] == [{True}, {False}, {True}]
    assert all(request.client not in ("", "u", "v") for request in engine.submitted)
