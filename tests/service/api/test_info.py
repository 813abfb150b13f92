import asyncio
import json
import re

import pytest

from service import __version__
from service.api.app import BODIES
from tests.service.api.client import app_of, client_for, client_of, error_of
from tests.service.scripted import CARD, TOKENIZER, ScriptedEngine, runtime_of, say

pytestmark = pytest.mark.anyio


async def test_models() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]
        assert (await client.get("/v1/models/org/tiny")).json() == listed["data"][1]
        missing = await client.get("/v1/models/nothing")
    assert listed["data"][0] == {
        "id": "tiny",
        "object": "model",
        "created": CARD.created,
        "owned_by": "adaptree",
        "root": "tiny-model",
        "parent": None,
        "max_model_len": 64,
        "drafter": "memory",
        "numerics": "exact",
    }
    assert (missing.status_code, error_of(missing)["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        body = {"model": "tiny", "prompt": "hello<|im_end|>", "return_token_strs": True}
        answer = (await client.post("/tokenize", json=body)).json()
        ids = TOKENIZER.encode("hello<|im_end|>", add_special_tokens=True)
        strings = [TOKENIZER.token_string(token_id) for token_id in ids]
        assert answer == {"count": len(ids), "max_model_len": 64, "tokens": ids, "token_strs": strings}
        plain = (await client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})).json()
        assert plain == {"count": 1, "max_model_len": 64, "tokens": TOKENIZER.encode("hello"), "token_strs": None}
        back = await client.post("/detokenize", json={"tokens": ids})
        assert back.json() == {"prompt": "<|bos|>hello<|im_end|>"}


async def test_tokenize_a_conversation() -> None:
    messages = [{"role": "user", "content": "hello"}]
    async with client_of(ScriptedEngine(say("x"))) as client:
        answer = (await client.post("/tokenize", json={"messages": messages})).json()
        assert answer["tokens"] == TOKENIZER.render_chat(messages)
        answer = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
        assert answer["tokens"] == TOKENIZER.render_chat(messages, add_generation_prompt=False)
        # The word alone does not make a conversation of it.
        assert (await client.post("/tokenize", json={"prompt": "messages"})).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_refusals(path: str, body: dict[str, object], status: int, param: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post(path, json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)


async def test_probes_through_a_life() -> None:
    runtime = runtime_of(ScriptedEngine(say("x")))
    app = app_of(runtime)
    async with client_for(app) as client:
        async with app.router.lifespan_context(app):
            await runtime.wait_until_loaded()
            for path in ("/readyz", "/health"):
                response = await client.get(path)
                assert (response.status_code, response.json()) == (200, {"status": "ready"})
        response = await client.get("/readyz")
        assert (response.status_code, error_of(response)["message"]) == (503, "The server is shutting down.")
        assert (await client.get("/livez")).json() == {"status": "alive"}


async def test_a_dead_engine_is_not_ready() -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine) as client:
        engine.failure = RuntimeError("out of memory")
        await client.get("/livez")
        await asyncio.sleep(0.05)
        assert (await client.get("/readyz")).status_code == 503


async def test_version_and_metrics() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        assert (await client.get("/version")).json() == {"version": __version__}
        response = await client.get("/metrics")
        assert (response.content, response.headers["content-type"]) == (b"lag 1\n", "text/plain")


async def test_the_document_describes_every_body_that_is_read() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        document = (await client.get("/openapi.json")).json()
    for path, model in BODIES.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].removeprefix("#/components/schemas/")
        described = document["components"]["schemas"][name]
        assert set(described["properties"]) == set(model.model_json_schema()["properties"])
    references = re.findall(r'"\$ref":\s*"([^"]+)"', json.dumps(document))
    assert {one.removeprefix("#/components/schemas/") for one in references} <= set(document["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "near"), [("/v1/chat/completion", "/v1/chat/completions"), ("/chat/completions", "/v1/chat/completions")]
)
async def test_an_unknown_address_names_the_one_that_was_meant(path: str, near: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        assert (await client.post(path, json={})).json()["error"]["message"].endswith(f"did you mean {near}?")
        assert "did you mean" not in (await client.post("/x", json={})).json()["error"]["message"]
