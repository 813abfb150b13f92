import asyncio
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from service import __version__
from service.api.app import BODIES
from service.api.page import PAGE_PATHS
from service.engine.requests import GenerationRequest, SequenceOutput, StepTree
from tests.service.api.client import ASK, Body, app_of, bearer, client_for, client_of, error_of, events_of
from tests.service.scripted import CARD, TOKENIZER, ScriptedEngine, runtime_of, say, step


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
        ids = TOKENIZER.encode("hello<|im_end|>", add_special_tokens=True, control=True)
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
                assert (response.status_code, response.json()) == (200, {"status": "ready", "switched_off": {}})
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


# The files of the live page: open, small, cached by content, and under a policy that lets nothing foreign in.

MOST_BYTES = 60_000
TYPES = {"/": "text/html", "css": "text/css", "js": "text/javascript"}


async def test_every_file_is_open_and_typed() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("key",), open_metrics=False) as client:
        for path in PAGE_PATHS:
            response = await client.get(path)
            expected = TYPES[path.rpartition(".")[2]]
            assert (response.status_code, response.headers["content-type"]) == (200, f"{expected}; charset=utf-8")
            assert response.headers["x-content-type-options"] == "nosniff"


async def test_the_page_is_small() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        sizes = {path: len((await client.get(path)).content) for path in PAGE_PATHS}
    assert sum(sizes.values()) < MOST_BYTES
    assert min(sizes.values()) > 500


async def test_the_policy_lets_nothing_foreign_or_inline_in() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        policy = (await client.get("/")).headers["content-security-policy"]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == ["'self'"]
    assert rules["frame-ancestors"] == ["'none'"]
    assert "unsafe" not in policy


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        first = await client.get("/")
        again = await client.get("/", headers={"if-none-match": first.headers["etag"]})
        other = await client.get("/", headers={"if-none-match": '"other"'})
    assert (again.status_code, again.content) == (304, b"")
    assert other.content == first.content


async def test_only_the_files_of_the_page_are_served() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        for name in ("router.py", "__init__.py", "index.html", "../app.py", "%2e%2e/app.py", ""):
            assert (await client.get(f"/adaptree/page/{name}")).status_code == 404


def page_files() -> dict[str, str]:
    folder = files("service.api.page")
    return {file.name: file.read_text() for file in folder.iterdir() if file.name.endswith((".html", ".css", ".js"))}


def test_every_file_of_the_folder_is_served() -> None:
    assert {path.rpartition("/")[2] or "index.html" for path in PAGE_PATHS} == set(page_files())


def test_no_file_names_another_host() -> None:
    for name, text in page_files().items():
        hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+)", text))
        assert hosts <= {"www.w3.org"}, name


def test_text_never_becomes_markup() -> None:
    for name, text in page_files().items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), name


# The routes that forget past answers: whose, who may, and what is answered where that cannot be done.

OWN, ALL = "/v1/memory", "/v1/adaptation/memory"


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
async def test_without_the_key_nothing_is_forgotten(path: str, key: str, admin_key: str | None) -> None:
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


# Chunks that say what each step did: for streams that ask, and for no one else.

TRACE = {"speculation": {"trace": True}}
FLOWER = "\N{CHERRY BLOSSOM}"
FLOWER_TOKENS = tuple(TOKENIZER.encode(FLOWER))


def tree(tokens: tuple[int, ...], path: tuple[int, ...]) -> StepTree:
    """A chain."""
    return StepTree(tokens, tuple(range(-1, len(tokens) - 1)), (0.123456,) * len(tokens), path)


def script(request: GenerationRequest) -> Iterable[list[SequenceOutput]]:
    """Three steps; the second ends within a character, and the last is cut off by a stop."""
    a, b = TOKENIZER.encode("ab")
    asked = request.speculation.trace
    for index in range(request.n):
        outputs = [
            replace(step(request, index, "ab"), tree=tree((a, 5, 6), (0,))),
            replace(step(request, index, ""), token_ids=FLOWER_TOKENS[:2], tree=tree((), ())),
            replace(
                step(request, index, FLOWER, "stop"),
                token_ids=FLOWER_TOKENS[2:],
                tree=tree((*FLOWER_TOKENS[2:], b), (0, 1, 2)),
            ),
        ]
        for output in outputs:
            yield [output if asked else replace(output, tree=None)]


async def chunks_of(path: str, **fields: Any) -> list[Body]:
    body = {"model": "tiny", **({"messages": ASK["messages"]} if "chat" in path else {"prompt": "a"}), **fields}
    async with client_of(ScriptedEngine(script)) as client:
        return events_of(await client.post(path, json={**body, "stream": True}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_each_chunk_tells_of_its_step(path: str) -> None:
    chunks = await chunks_of(path, **TRACE)
    reported = [choice["speculation"] for chunk in chunks for choice in chunk["choices"] if "speculation" in choice]
    assert [(one["accepted"], one["drafted"]) for one in reported] == [(1, 3), (0, 0), (2, 3)]
    assert [one["texts"] for one in reported] == [["a", "b"], ["", ""], ["", FLOWER]]
    assert reported[0]["tree"] == {
        "texts": ["a", *(TOKENIZER.decode([token]) for token in (5, 6))],
        "parents": [-1, 0, 1],
        "survival": [0.1235] * 3,
        "path": [0],
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_other_is_informed(path: str) -> None:
    traced, plain = await chunks_of(path, **TRACE), await chunks_of(path)
    assert not any("speculation" in choice for chunk in plain for choice in chunk["choices"])

    def text(chunks: list[Body]) -> str:
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)

    assert text(traced) == text(plain) == "ab" + FLOWER


async def test_choices_are_distinguished() -> None:
    chunks = await chunks_of("/v1/chat/completions", n=2, **TRACE)
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(text for one in mine for text in one.get("speculation", {}).get("texts", [])) == "ab" + FLOWER


@pytest.mark.parametrize(("stream", "trace", "asked"), [(True, True, True), (False, True, False), (True, False, False)])
async def test_the_engine_is_asked_only_for_streams(stream: bool, trace: bool, asked: bool) -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine) as client:
        await client.post("/v1/chat/completions", json={**ASK, "stream": stream, "speculation": {"trace": trace}})
    assert [request.speculation.trace for request in engine.submitted] == [asked]
