"""Stored responses: what they cost, who loses which when memory is short, and what an item's id stands for."""

import pickle
import re
from dataclasses import replace
from itertools import count
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.responses import ResponseStore, Turn
from service.errors import NotFound
from tests.service import scripted
from tests.service.api.client import RESPONSES, Body, client_of, error_of
from tests.service.scripted import ScriptedEngine, say

MEBIBYTE = 1024**2
KEYS = {"one": {"authorization": "Bearer one"}, "two": {"authorization": "Bearer two"}}
ASKED = {"role": "user", "content": "a"}


async def create(client: httpx2.AsyncClient, key: str = "one", **fields: Any) -> Body:
    body = {"model": "tiny", "input": [ASKED], **fields}
    response = await client.post(RESPONSES, json=body, headers=KEYS[key])
    return {"http_status": response.status_code, **response.json()}


async def status_of(client: httpx2.AsyncClient, response: Body, key: str = "one") -> int:
    return (await client.get(f"{RESPONSES}/{response['id']}", headers=KEYS[key])).status_code


STEP = st.tuples(st.sampled_from("abc"), st.sampled_from("kkkfd"), st.integers(0, 3), st.integers(12, 90))


@given(st.lists(STEP, min_size=40, max_size=40))
def test_any_history_of_a_store_is_that_of_whole_conversations(steps: list[tuple[str, str, int, int]]) -> None:
    """The model: conversations held whole; of the owner of the most, the response used longest ago goes. The store
    holds every text that it needs, once, and no other."""
    room, store, numbers = 900, ResponseStore(max_bytes=900), count(100)
    ever: dict[str, list[Turn]] = {owner: [] for owner in "abc"}
    found: dict[str, dict[str, Turn]] = {}  # by owner and id, in the order of use
    names = dict[Turn, tuple[str, list[bytes], list[bytes]]]()  # id, texts of the conversation, texts beside it

    def needed(owner: str) -> set[bytes]:
        return {text for turn in found[owner].values() for texts in names[turn][1:] for text in texts}

    def taken(owner: str) -> int:
        return sum(map(len, needed(owner)))

    for owner, step, pick, size in steps:
        if step == "k":
            number = next(numbers)
            asked, spoken, thought, head = (b"<%d%c>" % (number, kind) + b"." * (size // 4) for kind in b"asth")
            previous = ever[owner][-pick] if 0 < pick <= len(ever[owner]) else None  # maybe deleted meanwhile
            turn = Turn(previous, (asked, spoken), head, {f"s{number}": spoken, f"t{number}": thought})
            names[turn] = str(number), [*(names[previous][1] if previous else ()), asked, spoken], [thought, head]
            store.keep(owner, str(number), turn)
            ever[owner].append(turn)
            found.setdefault(owner, {})[str(number)] = turn
            while sum(map(taken, found)) > room:
                fullest = max(found, key=taken)
                del found[fullest][next(iter(found[fullest]))]
        elif ever[owner]:
            turn = ever[owner][-1 - pick % len(ever[owner])]
            name = names[turn][0]
            known = found[owner].pop(name, None)
            if known and step == "f":
                found[owner][name] = known
            try:
                assert store.get(owner, name) is known
                if step == "d":
                    store.delete(owner, name)
            except NotFound:
                assert known is None
        for mine in found:
            for other, turns in ever.items():
                for turn in turns:
                    name, texts, beside = names[turn]
                    is_found = other == mine and name in found[mine]
                    assert store.item(mine, f"s{name}") == (texts[-1] if is_found else None)
                    assert not is_found or turn.conversation() == b",".join(texts)
                    assert not is_found or turn.response() == b'{%b,"output":[%b,%b]}' % (
                        beside[1],
                        texts[-1],
                        beside[0],
                    )
        held = re.findall(rb"<\d+[asth]>\.*", pickle.dumps(store))
        assert sorted(held) == sorted(text for mine in found for text in needed(mine))


async def test_a_long_conversation_takes_what_was_written_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored whole, these turns would take 80 MB, and the first ones would be gone."""
    monkeypatch.setattr(scripted, "CARD", replace(scripted.CARD, max_model_len=100_000))
    cut = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{" * 4000, "status": "incomplete"}
    async with client_of(ScriptedEngine(say("x")), max_request_bytes=MEBIBYTE) as client:
        first = last = await create(client, input=[cut, ASKED])
        for _ in range(200):
            last = await create(client, input=[cut, ASKED], previous_response_id=last["id"])
        assert [await status_of(client, one) for one in (first, last)] == [200, 200]
        assert last["usage"]["input_tokens"] > 200 * first["usage"]["input_tokens"] / 2


async def test_a_key_takes_nothing_from_the_share_of_another() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("one", "two"), max_request_bytes=4 * MEBIBYTE) as client:
        small = await create(client)
        large = [await create(client, "two", metadata={"a": "x" * (MEBIBYTE * 7 // 2)}) for _ in range(20)]
        assert await status_of(client, small) == 200
        assert [await status_of(client, one, "two") for one in large] == [404] * 2 + [200] * 18


async def test_a_reference_is_the_stored_item_of_the_same_key() -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine, api_keys=("one", "two")) as client:
        kept, forgotten, gone = [await create(client, store=store) for store in (True, False, True)]
        theirs = await create(client, "two")
        await client.delete(f"{RESPONSES}/{gone['id']}", headers=KEYS["one"])
        (item,) = kept["output"]
        await create(client, input=[ASKED, item, ASKED])
        whole = engine.submitted[-1].prompt
        for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"], "type": None}):
            assert (await create(client, input=[ASKED, reference, ASKED]))["http_status"] == 200
            assert engine.submitted[-1].prompt == whole
        after = await create(client, input=[reference, ASKED], previous_response_id=kept["id"])
        assert after["http_status"] == 200
        await create(client, input=[ASKED, item, item, ASKED])
        assert engine.submitted[-2].prompt == engine.submitted[-1].prompt
        await client.delete(f"{RESPONSES}/{kept['id']}", headers=KEYS["one"])
        messages = set()
        for unknown in (item, {"id": "msg_none"}, *(one["output"][0] for one in (forgotten, gone, theirs))):
            refused = await create(client, input=[ASKED, {"type": "item_reference", "id": unknown["id"]}])
            error = refused["error"]
            assert (refused["http_status"], error["param"], error["code"]) == (400, "input.1", "item_not_found")
            messages.add(error["message"].replace(unknown["id"], "ID"))
        assert len(messages) == 1


async def test_references_stand_for_no_more_than_a_body_holds() -> None:
    async with client_of(ScriptedEngine(say("x")), api_keys=("one",), max_request_bytes=3000) as client:
        kept = await create(client)
        reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
        refused = await create(client, input=[reference] * 30)
        assert (refused["http_status"], refused["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("item", "param", "named"),
    [
        (
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            "input.0.type",
            "'web_search_call' does not match",
        ),
        ({"type": 5, "role": "user", "content": "a"}, "input.0.type", "5"),
        ({"type": "function_call", "call_id": "c", "name": 5, "arguments": "{}"}, "input.0.name", "5"),
        ({"type": "custom_tool_call_output", "call_id": "c"}, "input.0.output", "output"),
        ({"type": "item_reference"}, "input.0.id", "id"),
        ({"content": "a"}, "input.0.role", "role"),
    ],
)
async def test_an_item_that_is_refused_is_named_by_its_own_type_and_field(item: Body, param: str, named: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        response = await client.post(RESPONSES, json={"model": "tiny", "input": [item]})
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert named in error["message"]
