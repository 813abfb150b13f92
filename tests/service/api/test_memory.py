"""The routes that forget past answers: whose, who may, and what is answered where that cannot be done."""

from typing import Any

import pytest

from tests.service.api.client import ASK, app_of, client_for, client_of, error_of
from tests.service.scripted import ScriptedEngine, runtime_of, say

pytestmark = pytest.mark.anyio

OWN, ALL = "/v1/memory", "/v1/adaptation/memory"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("separate_names", [False, True])
@pytest.mark.parametrize("api_keys", [(), ("one", "two")])
@pytest.mark.parametrize("name", [{}, {"user": "u"}, {"safety_identifier": "s", "user": "u"}])
async def test_a_client_forgets_what_its_requests_are_drafted_from(
    name: dict[str, str], api_keys: tuple[str, ...], separate_names: bool
) -> None:
    engine, headers = ScriptedEngine(say("x")), bearer("one")
    async with client_of(engine, api_keys=api_keys, separate_names=separate_names) as client:
        await client.post("/v1/chat/completions", json={**ASK, **name}, headers=headers)
        response = await client.delete(OWN, params=name, headers=headers)
    assert (response.status_code, response.json()) == (200, {"object": "memory", "deleted": True})
    assert engine.forgotten == [engine.submitted[0].scope.cache_namespace]


async def test_an_operator_forgets_all() -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine, api_keys=["one"], admin_key="boss") as client:
        assert (await client.delete(ALL, headers=bearer("boss"))).json() == {"object": "memory", "deleted": True}
    assert engine.forgotten == [None]


@pytest.mark.parametrize(
    ("path", "key", "admin_key"),
    [(OWN, "three", "boss"), (OWN, "boss", "boss"), (ALL, "one", "boss"), (ALL, "", "boss"), (ALL, "boss", None)],
)
async def test_whoever_has_not_the_key_forgets_nothing(path: str, key: str, admin_key: str | None) -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine, api_keys=["one"], admin_key=admin_key) as client:
        response = await client.delete(path, headers=bearer(key))
    assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key")
    assert engine.forgotten == []


async def test_what_cannot_be_done_is_an_error() -> None:
    engine = ScriptedEngine(say("x"))
    runtime = runtime_of(engine)
    app = app_of(runtime)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        for state, status, code in (("draining", 503, "not_ready"), ("failed", 500, "engine_stopped")):
            runtime.state = state  # type: ignore[assignment]
            response = await client.delete(OWN)
            assert (response.status_code, error_of(response)["code"]) == (status, code)
        runtime.state = "ready"
        assert (await client.get(OWN)).status_code == 405
    assert engine.forgotten == []


async def test_the_routes_are_described() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        paths: dict[str, Any] = (await client.get("/openapi.json")).json()["paths"]
    assert {value["name"] for value in paths[OWN]["delete"]["parameters"]} == {"user", "safety_identifier"}
    assert all("Forget" in paths[path]["delete"]["description"] for path in (OWN, ALL))
