"""Models that think between tags: thoughts stand beside the answer, whole and streamed, on both routes."""

import random
from typing import Any

import httpx2
import pytest
from pydantic import JsonValue

from service.text.answers import AnswerReader, CallReader, Thinking, ThoughtTokens, thinks
from service.text.chat_template import HERMES, Call
from service.text.grammars import GrammarKind, as_lark
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import ASK, client_of, events_of
from tests.service.scripted import ScriptedEngine, say
from tests.service.text.grammar_parts import COMPILER, TOKENIZER, matches
from tests.service.text.tiny_tokenizer import TEMPLATE, tiny_tokenizer

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


# Thoughts before answers: read however they are cut, and a grammar holds for what is behind them.

BEFORE, BEGUN = Thinking(has_begun=False), Thinking(has_begun=True)
ANSWERS = [
    (BEFORE, "<think>\nTwo </thin\n\nlines\n</think>\n\nYes.\n", ("Two </thin\n\nlines", "Yes.\n")),
    (BEFORE, "\n<think></think>Yes", ("", "Yes")),
    (BEFORE, "Yes <think> no", ("", "Yes <think> no")),
    (BEFORE, "\n\n<thin", ("", "\n\n<thin")),
    (BEFORE, "<think>cut o", ("cut o", "")),
    (BEFORE, "<think>cut off\n</thi", ("cut off\n</thi", "")),
    (BEFORE, "", ("", "")),
    (BEGUN, "Hm.\n</think>\nYes </think>.", ("Hm.", "Yes </think>.")),
    (BEGUN, "\n</think>Yes", ("", "Yes")),
    (BEGUN, "never ends", ("never ends", "")),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), ANSWERS)
def test_however_an_answer_is_cut(thinking: Thinking, text: str, expected: tuple[str, str]) -> None:
    assert AnswerReader(thinking, None).whole(text) == (*expected, [])
    for seed in range(20):
        rng, reader, left = random.Random(seed), AnswerReader(thinking, None), text
        spoken = {"thought": "", "text": ""}
        while True:
            size = rng.randint(1, 9)
            for piece in reader.read(left[:size], ends=len(left) <= size):
                spoken[piece.kind] += piece.text
            left = left[size:]
            if not left:
                break
        assert (spoken["thought"], spoken["text"]) == expected


@pytest.mark.parametrize(
    ("thinking", "tokens", "count"),
    [
        (BEFORE, ["\n", "<thi", "nk>", "Hm", "</th", "ink>\nYes", "."], 6),
        (BEFORE, ["<think>", "cut"], 2),
        (BEFORE, ["<", "b>", "</think>"], 0),
        (BEFORE, ["<think></think>", "Yes"], 1),
        (BEGUN, ["Hm", "</think>", "Yes"], 2),
    ],
)
def test_the_tokens_of_a_thought_are_counted(thinking: Thinking, tokens: list[str], count: int) -> None:
    counted = ThoughtTokens(thinking, tokens.__getitem__)
    for token in range(len(tokens)):
        counted.read([token])
    at_once = ThoughtTokens(thinking, tokens.__getitem__)
    at_once.read(range(len(tokens)))
    assert counted.count == at_once.count == count


def test_calls_stand_behind_a_thought() -> None:
    call = Call("now", "{}")
    text = f"<think>I could {HERMES.written([Call('old', '{}')])}</think>\n{HERMES.written([call])}"
    assert AnswerReader(BEFORE, CallReader(HERMES)).whole(text) == (
        f"I could {HERMES.written([Call('old', '{}')])}",
        "",
        [call],
    )


@pytest.mark.parametrize(
    ("prompt", "has_begun"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)]
)
def test_the_end_of_the_prompt_says_whether_it_has_begun(prompt: str, has_begun: bool) -> None:
    assert Thinking.after(prompt).has_begun is has_begun


def test_models_that_think_have_it_in_their_template() -> None:
    assert thinks("{% if '</think>' in content %}")
    assert not thinks("{{ messages }}")
    assert not thinks(None)


YES: dict[GrammarKind, tuple[JsonValue, str]] = {
    "json_schema": ({"enum": ["yes"]}, '"yes"'),
    "regex": ("y/?es", "yes"),
    "choice": (["yes", "no"], "yes"),
    "grammar": ('root ::= "yes"', "yes"),
}


def accepts(grammar: str, text: str) -> bool:
    return matches(COMPILER.compile("lark", grammar), TOKENIZER._parsing.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", YES)
def test_a_grammar_holds_behind_a_thought(kind: GrammarKind) -> None:
    source, yes = YES[kind]
    grammar = as_lark(kind, source)
    begun, before = (thinking.grammar(grammar, {}) for thinking in (BEGUN, BEFORE))
    assert accepts(begun, f"no\n{{</thin</think>\n\n{yes}")
    assert accepts(before, f"<think>no\n</think>{yes}")
    assert accepts(before, yes)
    for text in (yes, "no</think>nay", f"a</think>{yes}</think>"):
        assert not accepts(begun, text)
    for text in ("nay", "<think>yes", f"<think>no</think>{yes}no"):
        assert not accepts(before, text)


def test_tags_may_be_tokens_outside_of_the_text() -> None:
    special = {"<think>": TOKENIZER.special_ids["<|extra_0|>"], "</think>": TOKENIZER.special_ids["<|extra_1|>"]}
    grammar = BEFORE.grammar(as_lark("choice", ["yes"]), special)
    assert accepts(grammar, "<|extra_0|>no<|extra_1|>yes")
    assert not accepts(grammar, "<think>no</think>yes")
    assert not accepts(BEGUN.grammar(as_lark("choice", ["yes"]), special), "no<|extra_1|>no")
