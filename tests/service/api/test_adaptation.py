"""The operators' routes: what they answer, to whom, and what they refuse."""

from itertools import product
from typing import Any

import httpx2
import pytest

from adaptation.records import NotStored
from tests.service.api.client import bearer, client_of, error_of
from tests.service.scripted import ScriptedAdaptation, ScriptedEngine, say

KEY = bearer("boss")
ROUTES = (
    ("GET", "/v1/adaptation"),
    ("POST", "/v1/adaptation/pause"),
    ("POST", "/v1/adaptation/resume"),
    ("POST", "/v1/adaptation/rollback"),
    ("POST", "/update_weights_from_disk"),
)


def learning(adaptation: ScriptedAdaptation | None, **changes: Any) -> Any:
    return client_of(ScriptedEngine(say("x")), adaptation=adaptation, **{"admin_key": "boss", **changes})


async def ask(client: httpx2.AsyncClient, method: str, path: str, headers: dict[str, str]) -> httpx2.Response:
    body = {"model_path": "somewhere"} if path == "/update_weights_from_disk" else None
    return await client.request(method, path, headers=headers, json=body)


@pytest.mark.parametrize("api_keys", [(), ("key",)])
async def test_without_the_admin_key_no_one_gets_in(api_keys: tuple[str, ...]) -> None:
    adaptation = ScriptedAdaptation()
    async with learning(adaptation, api_keys=api_keys) as client:
        for (method, path), offered in product(ROUTES, ({}, bearer("key"), bearer("bos"))):
            response = await ask(client, method, path, offered)
            assert (response.status_code, error_of(response)["code"]) == (401, "invalid_api_key"), (path, offered)
            assert "admin_key" in error_of(response)["message"]
    assert adaptation.asked == ["start", "stop"]


async def test_where_there_is_no_admin_key_no_one_gets_in() -> None:
    async with learning(ScriptedAdaptation(), admin_key=None) as client:
        for (method, path), offered in product(ROUTES, ({}, KEY, bearer(""), bearer("None"))):
            assert (await ask(client, method, path, offered)).status_code == 401, (path, offered)


async def test_where_no_one_learns_it_is_reported() -> None:
    async with learning(None) as client:
        for method, path in ROUTES:
            response = await ask(client, method, path, KEY)
            assert (response.status_code, error_of(response)["code"]) == (404, "adaptation_off"), path
            assert error_of(response)["message"].startswith("Learning is off. To turn it on,")


async def test_the_state_is_shown() -> None:
    async with learning(ScriptedAdaptation()) as client:
        state = (await client.get("/v1/adaptation", headers=KEY)).json()
    assert state["object"] == "adaptation"
    assert (state["policy"], state["paused"], state["version"], state["queries_observed"]) == ("bandit", False, 2, 40)
    assert state["values"] == {"head": 0.5, "full": "Infinity"}
    assert (state["condemned"], state["snapshots"], state["kl_to_anchor"]) == ([2], [1, 3], None)
    assert state["events"] == [
        {
            "unix_seconds": 1_700_000_000.5,
            "kind": "published",
            "version": 2,
            "reason": "better",
            "numbers": {"candidate": 2.5},
        }
    ]


async def test_operators_pause_resume_and_roll_back() -> None:
    adaptation = ScriptedAdaptation()
    async with learning(adaptation) as client:
        paused = [
            (await client.post(f"/v1/adaptation/{name}", headers=KEY)).json()["paused"]
            for name in ("pause", "rollback", "resume")
        ]
    assert paused == [True, True, False]
    assert adaptation.asked == ["start", "pause", "status", "rollback", "status", "resume", "status", "stop"]


async def test_weights_are_loaded_from_a_folder() -> None:
    adaptation = ScriptedAdaptation()
    async with learning(adaptation) as client:
        body = {"model_path": "some/folder", "flush_cache": True}
        response = await client.post("/update_weights_from_disk", json=body, headers=KEY)
    assert response.status_code == 200
    assert response.json() == {"success": True, "message": "Serving the drafter in some/folder as version 5."}
    assert "load some/folder" in adaptation.asked


@pytest.mark.parametrize("error", [ValueError("the head has another shape"), NotStored("no space left")])
async def test_refused_weights_are_an_answer(error: Exception) -> None:
    async with learning(ScriptedAdaptation(error)) as client:
        response = await client.post("/update_weights_from_disk", json={"model_path": "x"}, headers=KEY)
    assert (response.status_code, response.json()) == (400, {"success": False, "message": str(error)})


async def test_a_folder_must_be_named() -> None:
    async with learning(ScriptedAdaptation()) as client:
        for body in ({}, {"model_path": ""}, {"model_path": 3}, {"model_path": None}):
            response = await client.post("/update_weights_from_disk", json=body, headers=KEY)
            assert (response.status_code, error_of(response)["param"]) == (400, "model_path"), body


async def test_a_bug_in_learning_is_an_error_of_ours_and_no_more() -> None:
    async with learning(ScriptedAdaptation(RuntimeError("bug"))) as client:
        response = await client.get("/v1/adaptation", headers=KEY)
        assert (response.status_code, error_of(response)["code"]) == (500, "internal_error")
        assert (await client.get("/readyz")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/adaptation/nothing", "/update_weights_from_disk/x"])
async def test_what_lies_below_is_closed_too(path: str) -> None:
    async with learning(ScriptedAdaptation()) as client:
        assert (await client.get(path)).status_code == 401
        assert (await client.get(path, headers=KEY)).status_code == 404
