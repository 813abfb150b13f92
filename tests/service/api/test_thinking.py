"""Models that think between tags: thoughts stand beside the answer, whole and streamed, on both routes."""

from typing import Any

import httpx2
import pytest

from service.tokenizer import ChatTokenizer
from tests.service.api.client import ASK, client_of, events_of
from tests.service.scripted import ScriptedEngine, say
from tests.service.tiny_tokenizer import TEMPLATE, tiny_tokenizer

pytestmark = pytest.mark.anyio

PIECES = ("<thi", "nk>\nLet me", " see.\n</th", "ink>\n\nYe", "s.")
PAST = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
THINKS = ChatTokenizer(tiny_tokenizer(TEMPLATE.replace("{{ '<|im_start|>' +", PAST + "{{ '<|im_start|>' +", 1)))
ASK_RESPONSE = {"model": "tiny", "input": "hello"}


async def post(engine: ScriptedEngine, path: str, body: dict[str, Any], **fields: Any) -> httpx2.Response:
    async with client_of(engine, tokenizer=THINKS) as client:
        return await client.post(path, json={**body, **fields})


async def chat(engine: ScriptedEngine, **fields: Any) -> httpx2.Response:
    return await post(engine, "/v1/chat/completions", ASK, **fields)


async def test_a_whole_answer() -> None:
    (choice,) = (await chat(ScriptedEngine(say(*PIECES)))).json()["choices"]
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see.", "refusal": None}
    assert (choice["message"], choice["finish_reason"]) == (message, "stop")


async def test_a_thought_that_was_cut_off_has_no_content() -> None:
    (choice,) = (await chat(ScriptedEngine(say("<think>", "Let", finish="length")))).json()["choices"]
    assert choice["message"]["content"] is None
    assert (choice["message"]["reasoning_content"], choice["finish_reason"]) == ("Let", "length")


async def test_chunks_tell_thought_and_answer_apart() -> None:
    events = events_of(await chat(ScriptedEngine(say(*PIECES)), stream=True))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me see."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    kinds = [next(iter(delta)) for delta in deltas[1:] if delta]
    assert kinds == sorted(kinds, reverse=True)  # the thought first


async def test_past_thoughts_reach_the_template() -> None:
    engine = ScriptedEngine(say("Yes."))
    past = {"role": "assistant", "content": "No.", "reasoning_content": "Hm."}
    await chat(engine, messages=[*ASK["messages"], past, *ASK["messages"]])
    assert "<think>Hm.</think>" in THINKS.decode(engine.submitted[0].prompt)


async def test_a_grammar_leaves_room_for_the_thought() -> None:
    engine = ScriptedEngine(say("Yes."))
    await chat(engine, guided_choice=["Yes."])
    grammar = engine.submitted[0].grammar
    assert grammar is not None
    state = grammar.begin()
    assert state.forced(THINKS.encode("<think>a")) == []
    assert state.forced(THINKS.encode("Y")) != []


async def test_a_response_has_an_item_of_reasoning() -> None:
    response = (await post(ScriptedEngine(say(*PIECES)), "/v1/responses", ASK_RESPONSE)).json()
    thought, message = response["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Yes."


async def test_events_of_a_response_tell_of_the_thought_first() -> None:
    answer = await post(ScriptedEngine(say(*PIECES)), "/v1/responses", ASK_RESPONSE, stream=True)
    kinds = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.completed",
    ]
    assert kinds.count("response.output_item.added") == 2
