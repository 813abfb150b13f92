"""The record that says who may share what with whom, made at the door, and the view each of its readers has."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from adaptation.config import AdaptationConfig
from service.config import ServiceConfig
from service.engine.requests import Scope
from service.serve import api_settings
from tests.service.api.client import ASK, CHAT, RESPONSES, TEXT, app_of, client_of
from tests.service.scripted import ScriptedEngine, runtime_of, say

BODIES: dict[str, dict[str, Any]] = {
    CHAT: ASK,
    TEXT: {"model": "tiny", "prompt": ["a", "b"]},
    RESPONSES: {"model": "tiny", "input": "hello"},
}
NAMING_KEY = b"of this process"


@dataclass(frozen=True, slots=True)
class Door:
    """A server that answers from a script."""

    keys: tuple[str, ...] = ()
    separate_names: bool = False
    naming_key: bytes = NAMING_KEY

    async def scope(
        self,
        path: str = CHAT,
        *,
        key: str | None = None,
        address: tuple[str, int] | None = ("10.0.0.1", 1),
        **spoken: Any,
    ) -> Scope:
        """The scope that the engine sees of a request with these fields; one for all prompts of it."""
        engine = ScriptedEngine(say("x"))
        runtime = runtime_of(engine)
        app = app_of(runtime, api_keys=self.keys, separate_names=self.separate_names, naming_key=self.naming_key)
        transport = httpx2.ASGITransport(app=app, client=address)  # type: ignore[arg-type]
        headers = {"content-type": "application/json"} | ({} if key is None else {"authorization": key})
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client,
        ):
            await runtime.wait_until_loaded()
            response = await client.post(path, content=json.dumps({**BODIES[path], **spoken}))
            assert response.status_code == 200, response.text
        (scope,) = {request.scope for request in engine.submitted}
        return scope


OPEN, KEYED = Door(), Door(keys=("one", "two"))


@pytest.mark.parametrize("path", BODIES)
async def test_the_scope_is_the_key_and_the_named_user_on_every_route(path: str) -> None:
    scope = await KEYED.scope(path, key="Bearer one", safety_identifier="s", user="u")
    assert scope == await KEYED.scope(CHAT, key="bearer  one ", address=("b", 2), safety_identifier="s", user="other")
    other_key = await KEYED.scope(path, key="Bearer two", safety_identifier="s")
    other_name = await KEYED.scope(path, key="Bearer one", safety_identifier="t")
    assert (other_key.key != scope.key, other_key.name == scope.name) == (True, True)
    assert (other_name.key == scope.key, other_name.name != scope.name) == (True, True)


@pytest.mark.parametrize("door", [OPEN, KEYED])
async def test_the_name_is_the_safety_identifier_else_the_user_else_the_address(door: Door) -> None:
    key = "Bearer one" if door.keys else None

    async def name(address: str = "a", port: int = 1, **spoken: Any) -> str:
        return (await door.scope(key=key, address=(address, port), **spoken)).name

    assert await name(user="u") == await name("b", user="u") == await name(safety_identifier="u", user="v")
    assert await name() == await name(port=2) == await name(user="") == await name(user=None)
    apart = [await name(user="u"), await name(user="v"), await name(), await name("b"), await name(user="a")]
    assert len(set(apart)) == len(apart)
    assert (await door.scope(key=key, address=None)).name not in apart


async def test_without_keys_all_have_the_same_owner_whatever_they_send() -> None:
    scope = await OPEN.scope(key="Bearer one", user="u")
    assert scope.key == scope.owner == (await OPEN.scope(user="v")).owner == ""


@pytest.mark.parametrize("user", ["ada@example.org", "\0 \U0001f600"])
async def test_a_scope_reveals_nothing_and_holds_for_one_secret(user: str) -> None:
    scope = await KEYED.scope(key="Bearer one", user=user)
    for part in (scope.key, scope.name):
        assert len(part) == 32
        assert set(part) <= set("0123456789abcdef")
    other = await Door(keys=("one",), naming_key=b"another").scope(key="Bearer one", user=user)
    assert (other.key != scope.key, other.name != scope.name) == (True, True)


async def test_replicas_with_one_secret_make_the_same_scope(tmp_path: Path) -> None:
    async def scope(redis_secret: str | None) -> Scope:
        learning = {"enabled": True, "redis_url": "redis://localhost", "redis_secret": redis_secret}
        config = ServiceConfig(state_dir=tmp_path, adaptation=AdaptationConfig.model_validate(learning))
        key = api_settings(config).naming_key
        assert redis_secret is None or redis_secret.encode() not in key
        return await Door(keys=("one",), naming_key=key).scope(key="Bearer one", user="u")

    shared, other = "a secret of all replicas", "another secret of replicas"
    assert await scope(shared) == await scope(shared)
    assert len({await scope(shared), await scope(other), await scope(None), await scope(None)}) == 4


@pytest.mark.parametrize(("setting", "separate"), [("shared", False), ("per_client", True), ("off", False)])
async def test_the_setting_of_the_prefix_cache_decides_whether_names_are_apart(
    setting: str, separate: bool, tmp_path: Path
) -> None:
    settings = api_settings(ServiceConfig.model_validate({"state_dir": tmp_path, "prefix_cache": setting}))
    assert settings.separate_names is separate
    assert (await Door(separate_names=settings.separate_names).scope()).separate_names is separate


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("keys", [(), ("one", "two")])
async def test_each_reader_has_its_view_of_the_one_record(keys: tuple[str, ...], separate: bool) -> None:
    """Of any two requests: whether they share stored responses, the prefix cache, and an account."""
    door = Door(keys, separate)
    sent = [(key, user) for key in keys or ("",) for user in ("u", "v")]
    scopes = {(key, user): await door.scope(key=f"Bearer {key}" if key else None, user=user) for key, user in sent}
    for (key, user), mine in scopes.items():
        for (other_key, other_user), other in scopes.items():
            same_key, same_name = key == other_key, user == other_user
            assert (mine.owner == other.owner) == same_key
            assert (mine.cache_namespace == other.cache_namespace) == (same_key and (same_name or not separate))
            assert (mine.account == other.account) == same_key, "a name is only a claim"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("a-name", "b-name", False),
    ],
)
async def test_without_keys_the_account_is_the_network_that_a_client_has_to_itself(
    one: str, other: str, same: bool
) -> None:
    first, second = [await OPEN.scope(address=(host, 1), user=host) for host in (one, other)]
    assert (first.account == second.account) == same
    assert first.account == (await OPEN.scope(address=(one, 2), safety_identifier="new in each request")).account


async def test_a_request_says_itself_that_it_is_not_to_be_learnt_from() -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine) as client:
        for path, body in BODIES.items():
            for store, stored in ((None, True), (False, False), (True, True)):
                engine.submitted.clear()
                assert (await client.post(path, json={**body, "store": store})).status_code == 200
                assert {request.store for request in engine.submitted} == {stored}


def test_the_key_pays_and_without_keys_the_address() -> None:
    """Else a client that changes its address would have a new account each time."""
    assert Scope(key="k", name="n", address="a").account == "k"
    assert Scope(name="n", address="a").account == "a"
