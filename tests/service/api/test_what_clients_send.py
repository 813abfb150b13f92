"""What clients of other servers send: calls that are cut, messages and bodies in other forms, log-probabilities of
characters in pieces, tools of agents."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from service.engine.requests import GenerationRequest, SequenceOutput, TokenLogprob
from tests.service.api.client import ASK, CHAT, RESPONSES, TEXT, client_of, error_of, events_of, post
from tests.service.scripted import CARD, TOKENIZER, Script, ScriptedEngine, say, step


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools are listed in the prompt."""
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, max_model_len=8192))


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "go", "parameters": {"properties": {"to": {"type": "string"}}}}}
]
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "Rome"}}\n</tool_call>'


def cut(*pieces: str, stop: str | int | None = None, finish: str = "stop") -> Script:
    """An answer that a stop or a length cuts off."""

    def script(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        for outputs in say(*pieces, finish=finish)(request):
            yield [one if one.finish_reason is None else replace(one, stop_reason=stop) for one in outputs]

    return script


async def both(script: Script, **fields: Any) -> dict[str, Any]:
    """The choice that is sent whole, which the streamed one is equal to."""
    choice = (await post(ScriptedEngine(script), **fields)).json()["choices"][0]
    chunks = events_of(await post(ScriptedEngine(script), stream=True, **fields))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    calls: dict[int, str] = {}
    for piece in (call for delta in deltas for call in delta.get("tool_calls", ())):
        calls[piece["index"]] = calls.get(piece["index"], "") + piece["function"].get("arguments", "")
    whole = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    assert list(calls.values()) == whole
    end = chunks[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
    return {**choice["message"], **choice}


@pytest.mark.parametrize("pieces", [('<tool_call>\n{"name": "go", "arg', 'uments": {"to": "'), tuple(CALL[:52])])
async def test_a_stop_inside_a_call_leaves_no_call(pieces: tuple[str, ...]) -> None:
    choice = await both(cut(*pieces, stop="Rome"), tools=TOOLS, stop=["Rome"])
    assert (choice["content"], choice.get("tool_calls"), choice["finish_reason"]) == ("", None, "stop")
    assert choice["stop_reason"] == "Rome"


async def test_a_stop_behind_a_whole_call_leaves_that_one() -> None:
    second = '\n<tool_call>\n{"name": "go", "arguments": {"to": "'
    choice = await both(cut("So: ", CALL + second, stop=7), tools=TOOLS, stop_token_ids=[7])
    assert (choice["content"], len(choice["tool_calls"]), choice["finish_reason"]) == ("So: ", 1, "tool_calls")


async def test_a_call_that_a_length_cuts_is_reported_as_far_as_it_goes() -> None:
    choice = await both(cut('<tool_call>\n{"name": "go", "arguments": {"to": "', finish="length"), tools=TOOLS)
    assert (choice["tool_calls"][0]["function"]["arguments"], choice["finish_reason"]) == ('{"to": "', "length")


@pytest.mark.parametrize("spoken", ["<", "<tool", "<tool_call>", '<tool_call>\n{"na', '<tool_call>\n{"name": "g'])
async def test_the_beginning_of_a_call_is_no_content(spoken: str) -> None:
    choice = await both(cut(spoken, finish="length"), tools=TOOLS, tool_choice="required")
    assert (choice["content"], choice.get("tool_calls"), choice["finish_reason"]) == ("", None, "length")


@pytest.mark.parametrize(("spoken", "content"), [("a <", "a <"), ("a <tool_call>\n", "a ")])
async def test_where_text_is_allowed_what_may_be_text_is(spoken: str, content: str) -> None:
    assert (await both(cut(spoken, finish="length"), tools=TOOLS))["content"] == content


async def test_an_answer_that_ends_by_itself_says_no_stop_reason() -> None:
    assert (await both(say("a <tool"), tools=TOOLS))["content"] == "a <tool"


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "reasoning_content": "hm"},
        {"content": None, "reasoning": "hm"},
        {"content": None, "refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": "", "reasoning_content": None, "refusal": None},
    ],
)
async def test_our_own_messages_are_accepted(message: dict[str, Any]) -> None:
    engine = ScriptedEngine(say("x"))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", **message}, {"role": "user", "content": "b"}]
    assert (await post(engine, messages=turns)).status_code == 200
    assert ("No." in TOKENIZER.decode(engine.submitted[0].prompt)) == ("No." in str(message))


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ("image_url", "images are"),
        ("input_audio", "audio is"),
        ("file", "files are"),
        ("video_url", "video is"),
        ("input_image", "images are"),
    ],
)
async def test_what_is_no_text_is_refused_by_name(part: str, media: str) -> None:
    path, field, kind = (RESPONSES, "input", "input_text") if part == "input_image" else (CHAT, "messages", "text")
    content = [{"type": kind, "text": "What is it?"}, {"type": part, part: {"url": "data:,"}}]
    error = error_of(await post(ScriptedEngine(say("x")), path, **{field: [{"role": "user", "content": content}]}))
    assert error["param"] == f"{field}.0.content.1.type"
    assert f"'{part}' is not supported: {media} not supported, only text" in error["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_top_p_of_0_is_greedy(path: str) -> None:
    engine = ScriptedEngine(say("x"))
    assert (await post(engine, path, top_p=0, **({} if path == CHAT else {"input": "a"}))).status_code == 200
    assert (engine.submitted[0].sampling.temperature, engine.submitted[0].sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": {"enum": [1]}}},
        {"response_format": {"type": "json_schema", "schema": {"enum": [1]}}},
        {"json_schema": {"enum": [1]}},
        {"json_schema": '{"enum": [1]}'},
        {"regex": "1"},
        {"ebnf": 'root ::= "1"'},
        {"structured_outputs": {"regex": "1", "disable_fallback": True}},
    ],
)
async def test_forms_of_other_servers_bind_the_answer(fields: dict[str, Any]) -> None:
    engine = ScriptedEngine(say("1"))
    assert (await post(engine, **fields)).status_code == 200
    grammar = engine.submitted[0].grammar
    assert grammar is not None
    assert grammar.begin().forced([]) == TOKENIZER.encode("1")


async def test_a_body_may_be_packed() -> None:
    raw = json.dumps(ASK).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with client_of(ScriptedEngine(say("x"))) as client:

        async def send(body: bytes, encoding: str = "gzip") -> Any:
            return await client.post(CHAT, content=body, headers={**headers, "content-encoding": encoding})

        assert (await send(gzip.compress(raw))).status_code == 200
        assert (await send(gzip.compress(raw[:9]) + gzip.compress(raw[9:]), "x-gzip")).status_code == 200
        assert (await send(raw, "identity")).status_code == 200
        bomb = gzip.compress(b" " * 50_000_000)
        assert len(bomb) < 60_000
        assert (await send(bomb)).status_code == 413
        for bad in (raw, gzip.compress(raw)[:-9], gzip.compress(raw) + b"x"):
            response = await send(bad)
            assert (response.status_code, error_of(response)["param"]) == (400, "content-encoding")
        for encoding in ("br", "deflate", "gzip, gzip", "zstd"):
            response = await send(gzip.compress(raw), encoding)
            assert (response.status_code, error_of(response)["param"]) == (415, "content-encoding")


async def test_offsets_are_into_the_text_that_is_sent() -> None:
    text = "ä€😀e\u0301w"
    ids = TOKENIZER.encode(text)
    stream = TOKENIZER.detokenizer(skip_special_tokens=True)

    def script(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        for place, token in enumerate(ids):
            spoken = replace(step(request, 0, "", "stop" if place == len(ids) - 1 else None), text=stream.push(token))
            yield [replace(spoken, token_ids=(token,), logprobs=(TokenLogprob(token, -2.0, 9, ((3, -1.0),)),))]

    found = (await post(ScriptedEngine(script), TEXT, prompt="x", logprobs=1)).json()["choices"][0]
    assert found["text"] == text
    offsets = found["logprobs"]["text_offset"]
    assert offsets == [place for place, character in enumerate(text) for _ in TOKENIZER.encode(character)]
    for token, top in zip(found["logprobs"]["tokens"], found["logprobs"]["top_logprobs"], strict=True):
        assert token in top  # though another one was likelier
        assert len(top) <= 2


async def test_a_text_behind_calls_is_the_same_turn_on_both_routes() -> None:
    """Of the assistant's text and calls one turn, as chat completions have it."""
    chat, other = ScriptedEngine(say("x")), ScriptedEngine(say("x"))
    function = {"name": "go", "arguments": '{"to": "Rome"}'}
    turns = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "So:\n",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "there"},
    ]
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:\n"}]},
        {"type": "reasoning"},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": "there"},
    ]
    await post(chat, messages=turns, tools=TOOLS)
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    response = await post(other, RESPONSES, input=items, tools=tools)
    assert response.status_code == 200
    assert chat.submitted[0].prompt == other.submitted[0].prompt
    assert f"So:\n{CALL}" in TOKENIZER.decode(chat.submitted[0].prompt)


async def test_a_response_that_was_cut_inside_a_call_goes_on() -> None:
    engine = ScriptedEngine(cut('<tool_call>\n{"name": "go", "arguments": {"to": "', finish="length"))
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    async with client_of(engine) as client:
        first = (await client.post(RESPONSES, json={"model": "tiny", "input": "a", "tools": tools})).json()
        assert (first["status"], first["output"][0]["status"]) == ("incomplete", "incomplete")
        engine.script = say("x")
        for more in ("b", [{"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "?"}]):
            body = {"model": "tiny", "input": more, "previous_response_id": first["id"]}
            assert (await client.post(RESPONSES, json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "function_call", "call_id": "1", "name": "go", "arguments": "}"}]}, "input.0.arguments"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools.0.tools.0.type"),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]},
                    {"type": "function", "name": "c", "strict": True, "parameters": {"not": {}}},
                ]
            },
            "tools.1.parameters",
        ),
        (
            {
                "tools": [
                    {"type": "custom", "name": "b", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}
                ]
            },
            "tools.0.parameters.properties.input",
        ),
        (
            {
                "tools": [
                    {"type": "custom", "name": "b", "format": {"type": "grammar", "syntax": "lark", "definition": "("}}
                ]
            },
            "tools.0.format.definition",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "a", "shema": {}}}}, "text.format.shema"),
    ],
)
async def test_responses_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    response = await post(ScriptedEngine(say("x")), RESPONSES, **{"input": "a", **fields})
    assert (response.status_code, error_of(response)["param"]) == (400, param)


CUSTOM = [
    {
        "type": "namespace",
        "name": "files",
        "description": "Of the project.",
        "tools": [
            {"type": "custom", "name": "patch", "description": "Apply it.", "format": {"type": "text"}},
            {"type": "function", "name": "list", "parameters": {"type": "object", "properties": {}}},
        ],
    },
    {"type": "custom", "name": "run", "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "ls"'}},
]


async def test_custom_tools_and_namespaces() -> None:
    spoken = [
        ("files__patch", {"input": 'a\n"b"'}),
        ("files__list", {}),
        ("run", {"input": "ls"}),
    ]
    text = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in spoken
    )
    engine = ScriptedEngine(say(*text))
    body = {"model": "tiny", "input": "a", "tools": CUSTOM, "include": ["reasoning.encrypted_content"]}
    async with client_of(engine) as client:
        response = await client.post(RESPONSES, json=body)
        assert response.headers["x-adaptree-relaxed"] == "tools.1.format.definition"
        first = response.json()
        patch, listing, run = first["output"]
        assert [call["type"] for call in first["output"]] == ["custom_tool_call", "function_call", "custom_tool_call"]
        assert (patch["name"], patch["namespace"], patch["input"]) == ("patch", "files", 'a\n"b"')
        assert (listing["name"], listing["namespace"], listing["arguments"]) == ("list", "files", "{}")
        assert (run["name"], run.get("namespace"), run["input"]) == ("run", None, "ls")
        outputs = [{"type": "custom_tool_call_output", "call_id": patch["call_id"], "output": "done"}]
        again = {**body, "input": outputs, "previous_response_id": first["id"]}
        assert (await client.post(RESPONSES, json=again)).status_code == 200
        prompt = TOKENIZER.decode(engine.submitted[-1].prompt)
        assert '{"name": "files__patch", "arguments": {"input": "a\\n\\"b\\""}}' in prompt
        streamed = await client.post(RESPONSES, json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    of_patch = [event for event in events if event.get("output_index") == 0]
    assert [event["type"] for event in of_patch] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert of_patch[2]["input"] == 'a\n"b"'


async def test_origins_that_may_ask() -> None:
    page = {"origin": "https://chat.example"}
    asking = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_of(
        ScriptedEngine(say("x")),
        cors_origins=("https://chat.example",),
        api_keys=["k"],
        allowed_hosts=frozenset({"test"}),
    ) as client:
        preflight = await client.options(CHAT, headers=asking)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, page["origin"])
        answer = await client.post(CHAT, json=ASK, headers={**page, "authorization": "Bearer k"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["origin"])
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        refused = await client.post(CHAT, json=ASK, headers=page)
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
        other = await client.options(CHAT, headers={**asking, "origin": "https://chat.example.evil"})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
    async with client_of(ScriptedEngine(say("x"))) as client:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers=page)).headers


PATHS = ("/v1/models", "/v1/models/", "/v1/models/org/tiny", "/version", "/health/", "/metrics", "/openapi.json", "/")


@pytest.mark.parametrize("path", PATHS)
async def test_head_is_get_without_a_body(path: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        head, get = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_head_of_a_feed_ends() -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        assert (await client.head("/adaptree/feed")).status_code == 200
        missing = await client.head("/v1/models/none")
        assert missing.status_code == 404
