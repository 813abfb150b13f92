"""A stream that is cut off behind any of its events and taken up again is the undisturbed one: no token twice, none
missing, on a real engine whose steps bring different numbers of tokens each time."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from service.assembly import Assembly, assemble
from service.engine.requests import GenerationRequest, SequenceOutput
from service.engine.thread import EngineThread
from service.runtime import Runtime, ServedModel
from service.serve import card_of
from tests.service.api.client import CHAT, TEXT, Body, app_of, client_for, error_of
from tests.service.api.client import client_of as scripted
from tests.service.bench.parts import save_two_layers, settings_for
from tests.service.scripted import ScriptedEngine, say, step

SAY = {"messages": [{"role": "user", "content": "so it is"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "go", "parameters": {"type": "object", "properties": {"to": {"enum": ["Rome", "Pau"]}}}},
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["one", "two"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folder = save_two_layers(tmp_path_factory.mktemp("model"))
    changes = {"budget_policy": "fixed", "max_budget": 8, "drafter": "memory", "served_model_name": "tiny"}
    changes |= {"max_model_len": 512}
    return assemble(settings_for(folder).model_copy(update=changes))


@asynccontextmanager
async def serving(assembly: Assembly) -> AsyncIterator[httpx2.AsyncClient]:
    runtime = Runtime(
        lambda: ServedModel(EngineThread(assembly.engine()), assembly.tokenizer, card_of(assembly)), max_waiting=1000
    )
    app = app_of(runtime, max_output_tokens=200)
    async with app.router.lifespan_context(app), client_for(app) as client:
        await runtime.wait_until_loaded()
        yield client


Event = tuple[str, Body]


async def stream(client: httpx2.AsyncClient, path: str, body: Body, last: str | None = None) -> list[Event]:
    headers = {} if last is None else {"last-event-id": last}
    response = await client.post(path, json={"model": "tiny", "stream": True, **body}, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return list(map(event_of, frames[:-2]))


def event_of(frame: str) -> Event:
    lines = frame.split("\n")
    assert [line.partition(": ")[0] for line in lines] == ["id", "data"], frame
    return lines[0].removeprefix("id: "), json.loads(lines[1].removeprefix("data: "))


def spoken(events: list[Event]) -> Body:
    """All that a client knows in the end: what grows is put together, what is reported once is a list."""
    known: dict[str, Any] = {}
    for _, chunk in events:
        assert "error" not in chunk, chunk
        known.setdefault("heads", set()).add((chunk["id"], chunk["created"], chunk["seed"], chunk["model"]))
        if chunk.get("usage") is not None and not chunk["choices"]:
            known["usage"] = [*known.get("usage", []), tuple(chunk["usage"][name] for name in USAGE)]
        for choice in chunk["choices"]:
            for kind, value in grown(choice):
                name = f"{choice['index']} {kind}"
                known[name] = known[name] + value if name in known else value
    return known


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")


def grown(choice: Body) -> Iterator[tuple[str, Any]]:
    delta = choice.get("delta", {"content": choice.get("text")})
    yield "content", delta.get("content") or ""
    yield "roles", [delta["role"]] if "role" in delta else []
    for call in delta.get("tool_calls", ()):
        yield f"call {call['index']}", call["function"]["arguments"]
        if "id" in call:
            yield "calls", [(call["id"], call["function"]["name"])]
    for name in ("token_ids", "prompt_token_ids"):
        yield name, choice.get(name) or []
    for name, values in (choice["logprobs"] or {}).items():
        yield f"logprobs {name}", values or []
    yield "ends", [(choice["finish_reason"], choice["stop_reason"])] if choice["finish_reason"] else []


USUAL: Body = {"stream_options": {"include_usage": True}, "max_tokens": 14}
CASES: dict[str, tuple[str, Body]] = {
    "greedy": (CHAT, {**SAY, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}),
    "sampled": (CHAT, {**SAY, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}),
    "stops": (CHAT, {**SAY, "structured_outputs": {"choice": ["ababac and more"]}, "stop": ["abac", "and"]}),
    "emoji": (CHAT, {**SAY, "structured_outputs": {"choice": ["é🙂👍🏽!", "ü🙃👎🏿?"]}, "max_tokens": 40}),
    "calls": (CHAT, {**SAY, "tools": [TOOL], "tool_choice": "required", "max_tokens": 100, "logprobs": True}),
    "schema": (
        CHAT,
        {**SAY, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ),
    "choices": (CHAT, {**SAY, "n": 2, "ignore_eos": True, "temperature": 1.0, "max_tokens": 8}),
    "prompts": (TEXT, {"prompt": ["a b", "c"], "n": 2, "logprobs": 1, "echo": None, "max_tokens": 6}),
    "echo": (TEXT, {"prompt": "a b", "echo": True, "seed": 5, "temperature": 0.0}),
}
CASES["schema"][1]["max_tokens"] = 60


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_cut_behind_any_event_goes_on_as_if_nothing_had_been(assembly: Assembly, name: str) -> None:
    path, body = CASES[name][0], {**USUAL, **CASES[name][1]}
    async with serving(assembly) as client:
        events = await stream(client, path, body)
        rests = await asyncio.gather(*(stream(client, path, body, mark) for mark, _ in events))
    whole = spoken(events)
    assert len(whole["heads"]) == len(whole["usage"]) == 1
    for count, rest in enumerate(rests, start=1):
        assert spoken(events[:count] + rest) == whole
    assert rests[-1] == []
    # And once more, cut off while it was going on already.
    async with serving(assembly) as client:
        middle = rests[len(rests) // 3]
        again = await asyncio.gather(*(stream(client, path, body, mark) for mark, _ in middle))
    for count, rest in enumerate(again, start=1):
        assert spoken(events[: len(rests) // 3 + 1] + middle[:count] + rest) == whole


def tokens_in(marks: list[str]) -> str:
    """What ids say of tokens, in a row."""
    return "".join(mark[mark.index("~") :] for mark in marks if "~" in mark)


async def test_an_engine_is_given_what_ids_say() -> None:
    """Of each choice, as far as it is known without a gap."""
    engine = ScriptedEngine(say(*"abcd"))
    async with scripted(engine) as client:
        events = await stream(client, CHAT, {**SAY, "n": 2})
        bare, reported = events[-1][0].partition("~")[0], tokens_in([mark for mark, _ in events])
        await stream(client, CHAT, {**SAY, "n": 2}, bare + reported)
        await stream(client, CHAT, {**SAY, "n": 2}, bare + reported.replace("~0@1:", "~0@7:"))
        await stream(client, CHAT, {**SAY, "n": 2}, events[-1][0])
    first, whole, gap, last = (request.replayed for request in engine.submitted)
    assert first == ()
    assert [len(tokens) for tokens in whole] == [4, 4]
    assert gap == (whole[0][:1], whole[1])
    assert last == ((), ())


@pytest.mark.parametrize("spoken", ["~", "~0@0:", "~0@0:1,", "~0@0:x", "~0:1", "~0@0:99999"])
async def test_tokens_that_cannot_be_are_refused(spoken: str) -> None:
    async with scripted(ScriptedEngine(say("x", "y"))) as client:
        ((mark, _), *_) = await stream(client, CHAT, SAY)
        headers = {"last-event-id": mark.partition("~")[0] + spoken}
        response = await client.post(CHAT, json={"model": "tiny", "stream": True, **SAY}, headers=headers)
        assert (response.status_code, error_of(response)["param"]) == (400, "last-event-id")


async def test_several_chunks_of_one_step_are_distinguished(assembly: Assembly) -> None:
    """A step brings a call's name and the beginning of its arguments: the case above has cut between them."""
    async with serving(assembly) as client:
        events = await stream(client, CHAT, {**USUAL, **CASES["calls"][1]})
    assert any("+" in mark and "tool_calls" in chunk["choices"][0]["delta"] for mark, chunk in events[:-1])


async def test_choices_need_not_be_as_far_again_as_they_were() -> None:
    """The first time choices take turns; then one is generated whole before the other begins."""
    texts = ("abcd", "wxyz")

    def script(request: GenerationRequest) -> Iterator[list[SequenceOutput]]:
        order = [(place, index) for place in range(4) for index in range(2)]
        for place, index in order if len(engine.submitted) == 1 else sorted(order, key=lambda one: one[1]):
            yield [step(request, index, texts[index][place], "stop" if place == 3 else None)]

    engine, body = ScriptedEngine(script), {**SAY, "n": 2}
    async with scripted(engine) as client:
        events = await stream(client, CHAT, body)
        whole = spoken(events)
        assert (whole["0 content"], whole["1 content"]) == texts
        for cut, (mark, _) in enumerate(events, start=1):
            rest = await stream(client, CHAT, body, mark)
            for count, (later, _) in enumerate(rest, start=1):
                assert spoken(events[:cut] + rest[:count] + await stream(client, CHAT, body, later)) == whole


async def test_a_count_of_tokens_is_enough_where_the_seed_is_known(assembly: Assembly) -> None:
    body = {**SAY, **USUAL, "n": 2, "seed": 3, "return_token_ids": True, "ignore_eos": True}
    async with serving(assembly) as client:
        whole = spoken(await stream(client, CHAT, body))
        rest = spoken(await stream(client, CHAT, {**body, "resume_from": [5, 9]}))
    assert rest["0 token_ids"] == whole["0 token_ids"][5:]
    assert rest["1 token_ids"] == whole["1 token_ids"][9:]
    assert whole["0 content"].endswith(rest["0 content"])
    assert rest["usage"] == whole["usage"]
    assert "0 roles" in whole
    assert rest["0 roles"] == []


async def test_counts_are_of_one_prompt_for_each_has_a_seed_where_it_was_drawn() -> None:
    body = {"model": "tiny", "prompt": ["a", "b"], "seed": 1, "stream": True, "resume_from": [1, 1]}
    async with scripted(ScriptedEngine(say("x", "y"))) as client:
        response = await client.post(TEXT, json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, "resume_from")
        assert (await client.post(TEXT, json={**body, "temperature": 0})).status_code == 200


async def refused(body: Body, headers: dict[str, str] | None = None) -> tuple[int, Body]:
    async with scripted(ScriptedEngine(say("x", "y"))) as client:
        response = await client.post(CHAT, json={"model": "tiny", **SAY, **body}, headers=headers)
        return response.status_code, error_of(response)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"resume_from": 2, "seed": 1}, "resume_from"),
        ({"resume_from": 2, "stream": True}, "seed"),
        ({"resume_from": [2], "seed": 1, "n": 2, "stream": True}, "resume_from"),
        ({"resume_from": [], "seed": 1, "stream": True}, "resume_from"),
        ({"resume_from": -1, "seed": 1, "stream": True}, "resume_from"),
        ({"resume_from": "", "stream": True}, "resume_from"),
        ({"resume_from": "abc.1", "stream": True}, "resume_from"),
        ({"resume_from": "ä", "stream": True}, "resume_from"),
        ({"resume_from": 0, "seed": 1, "stream": True, "speculation": {"trace": True}}, "speculation.trace"),
    ],
)
async def test_what_cannot_go_on_names_the_field(fields: Body, param: str) -> None:
    status, error = await refused(fields)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("mark", ["", "7", "x" * 70 + ".1", "é.1"])
async def test_a_header_that_is_no_id_is_refused(mark: str) -> None:
    status, error = await refused({"stream": True}, {b"last-event-id": mark.encode()})  # type: ignore[dict-item]
    assert (status, error["param"]) == (400, "last-event-id")


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"temperature": 0.5}, "other_request"),
        ({"messages": [{"role": "user", "content": "else"}]}, "other_request"),
        ({"logprobs": True}, "other_request"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
async def test_an_answer_goes_on_for_the_same_request_alone(other: Body, code: str | None) -> None:
    body = {"model": "tiny", "stream": True, **SAY}
    async with scripted(ScriptedEngine(say("x", "y"))) as client:
        ((mark, _), *_) = await stream(client, CHAT, body)
        response = await client.post(CHAT, json={**body, **other}, headers={"last-event-id": mark})
    assert response.status_code == (409 if code else 200)
    if code is not None:
        error = error_of(response)
        assert (error["param"], error["code"]) == ("last-event-id", code)


async def test_an_answer_of_another_model_does_not_go_on(assembly: Assembly) -> None:
    body = {"model": "tiny", "stream": True, "max_tokens": 3, **SAY}
    async with serving(assembly) as client:
        ((mark, _), *_) = await stream(client, CHAT, body)
    status, error = await refused({**body, "resume_from": mark})
    assert (status, error["param"], error["code"]) == (409, "resume_from", "other_system_fingerprint")


async def test_more_than_there_is_ends_the_stream_with_an_error(assembly: Assembly) -> None:
    body = {"model": "tiny", "stream": True, **SAY, **USUAL, "seed": 1, "resume_from": 1000}
    async with serving(assembly) as client:
        response = await client.post(CHAT, json=body)
    assert '"param":"resume_from"' in response.text
    assert response.text.endswith("data: [DONE]\n\n")


RESPONSES = "/v1/responses"
CALL = {"type": "function", **TOOL["function"]}
NOTE = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
RESPONSE_CASES: dict[str, Body] = {
    "text": {"input": "so it is", "ignore_eos": True, "max_output_tokens": 14, "temperature": 0.0},
    "sampled": {"input": "so it is", "max_output_tokens": 14, "instructions": "Be brief.", "store": False},
    "call": {"input": "so it is", "tools": [CALL], "tool_choice": "required", "max_output_tokens": 60},
    "schema": {"input": "so it is", "text": NOTE, "max_output_tokens": 60},
}


async def response_stream(client: httpx2.AsyncClient, body: Body, last: str | None = None) -> list[Event]:
    headers = {} if last is None else {"last-event-id": last}
    answer = await client.post(RESPONSES, json={"model": "tiny", "stream": True, **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return response_events(answer.text)


def response_events(text: str) -> list[Event]:
    frames = "\n".join(line for line in text.split("\n") if not line.startswith(":")).split("\n\n")
    assert frames.pop() == ""
    events = []
    for name, event_id, data in (frame.split("\n") for frame in frames):
        reported = json.loads(data.removeprefix("data: "))
        assert name == f"event: {reported['type']}"
        events.append((event_id.removeprefix("id: "), reported))
    return events


def reported(events: list[Event]) -> tuple[list[Body], dict[str, str]]:
    """All that a client knows in the end: whole events in order, and what deltas of each item add up to."""
    whole, grown_to = [], dict[str, str]()
    for number, (_, event) in enumerate(events):
        assert event["sequence_number"] == number
        if event["type"].endswith(".delta"):
            grown_to[event["item_id"]] = grown_to.get(event["item_id"], "") + event["delta"]
            continue
        if event.get("response", {}).get("usage"):
            event["response"]["usage"].pop("input_tokens_details", None)  # of the cache, as it was this time
        whole.append({name: value for name, value in event.items() if name != "sequence_number"})
    return whole, grown_to


@pytest.mark.parametrize("name", RESPONSE_CASES)
async def test_a_response_cut_behind_any_event_goes_on_as_if_nothing_had_been(assembly: Assembly, name: str) -> None:
    body = RESPONSE_CASES[name]
    async with serving(assembly) as client:
        events = await response_stream(client, body)
    async with serving(assembly) as client:  # which has never heard of it
        rests = await asyncio.gather(*(response_stream(client, body, mark) for mark, _ in events))
        again = await asyncio.gather(*(response_stream(client, body, mark) for mark, _ in rests[2]))
        stored = await client.get(f"{RESPONSES}/{events[0][1]['response']['id']}")
    whole, grown_to = reported(events)
    assert whole[-1]["type"] in ("response.completed", "response.incomplete")
    assert "".join(grown_to.values()) != ""
    for count, rest in enumerate(rests, start=1):
        assert reported(events[:count] + rest) == (whole, grown_to)
    assert rests[-1] == []
    for count, rest in enumerate(again, start=1):
        assert reported(events[:3] + rests[2][:count] + rest) == (whole, grown_to)
    assert stored.status_code == (404 if body.get("store") is False else 200)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"resume_from": 2, "seed": 1, "stream": True}, 400, "resume_from"),
        ({"resume_from": "x", "stream": True}, 400, "resume_from"),
        ({"resume_from": "MARK"}, 400, "resume_from"),
        ({"resume_from": "MARK", "stream": True, "instructions": "Be brief."}, 409, "resume_from"),
        ({"resume_from": "MARK.more", "stream": True}, 400, "resume_from"),
    ],
)
async def test_a_response_that_cannot_go_on_names_the_field(fields: Body, status: int, param: str) -> None:
    body: Body = {"input": "so it is", "max_output_tokens": 3}
    async with scripted(ScriptedEngine(say("x", "y"))) as client:
        ((mark, _), *_) = await response_stream(client, body)
        asked = json.loads(json.dumps({"model": "tiny", **body, **fields}).replace("MARK", mark))
        answer = await client.post(RESPONSES, json=asked)
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)


async def test_a_stored_response_is_not_streamed() -> None:
    async with scripted(ScriptedEngine(say("x"))) as client:
        answer = await client.get(f"{RESPONSES}/resp_1", params={"stream": "true", "starting_after": 2})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "stream")
