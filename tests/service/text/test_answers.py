"""Calls as families of models write them, read back however they are cut, and bound by the functions' schemas."""

import random
from dataclasses import replace

import pytest
from pydantic import JsonValue

from service.text.answers import AnswerReader, Calling, CallReader, Piece
from service.text.chat_template import HERMES, LLAMA_3, MISTRAL, Call, ToolForm, Traits, form_of
from service.text.grammars import finished
from tests.service.text.grammar_parts import COMPILER, TOKENIZER, matches

ROME, NOW = Call("weather", '{"city": "Ro}\\"m{e", "days": [1, {"a": null}]}'), Call("now", "{}")
RECORDED = {
    HERMES: (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ro}\\"m{e", "days": [1, {"a": null}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    MISTRAL: (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ro}\\"m{e", "days": [1, {"a": null}]}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    LLAMA_3: (
        '{"name": "weather", "parameters": {"city": "Ro}\\"m{e", "days": [1, {"a": null}]}}; '
        '{"name": "now", "parameters": {}}'
    ),
}
"""Two calls, as the model cards of Qwen 2.5, Mistral 7B v0.3 and Llama 3.1 show them."""
FORMS = list(RECORDED)
SCHEMAS: dict[str, dict[str, JsonValue]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


def whole(text: str, form: ToolForm) -> tuple[str, list[Call]]:
    return AnswerReader(None, CallReader(form)).whole(text)[1:]


@pytest.mark.parametrize("form", FORMS)
def test_recorded_calls(form: ToolForm) -> None:
    assert form.written([ROME, NOW]) == RECORDED[form]
    assert whole(RECORDED[form], form) == ("", [ROME, NOW])


@pytest.mark.parametrize("form", FORMS)
def test_however_an_answer_is_cut(form: ToolForm) -> None:
    for seed in range(50):
        lead = "" if form is LLAMA_3 else "Sure <tool_ [TOOL_C. "
        text, rng, reader = lead + RECORDED[form], random.Random(seed), CallReader(form)
        pieces: list[Piece] = []
        while text:
            size = rng.randint(1, 7)
            pieces += reader.read(text[:size], ends=len(text) <= size)
            text = text[size:]
        assert "".join(piece.text for piece in pieces if piece.kind == "text") == lead
        assert [piece.text for piece in pieces if piece.kind == "name"] == ["weather", "now"]
        for number, call in enumerate((ROME, NOW)):
            arguments = (piece.text for piece in pieces if piece.kind == "arguments" and piece.call == number)
            assert "".join(arguments) == call.arguments


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", ["", "Hello.", "a < b", '{"a": 1}', "<tool_call", '{"na', "{}\n{"])
def test_an_answer_without_calls_is_all_text(form: ToolForm, text: str) -> None:
    assert whole(text, form) == (text, [])


def test_the_form_is_what_the_template_teaches() -> None:
    assert form_of("{% if tools %}<tool_call>") is HERMES
    assert form_of("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert form_of('{% if tools %}{"name": ..., "parameters": ...}') is LLAMA_3


def accepts(
    calling: Calling,
    text: str,
    answer: dict[str, JsonValue] | None = None,
    schemas: dict[str, dict[str, JsonValue]] = SCHEMAS,
) -> bool:
    written = finished(calling.grammar(schemas, answer, TOKENIZER.special_ids))
    return matches(COMPILER.compile("lark", written), text)


@pytest.mark.parametrize("form", FORMS)
def test_what_may_be_called_and_how(form: ToolForm) -> None:
    one, two = form.written([NOW]), form.written([Call("weather", '{"city": "Rome"}'), NOW])
    may = Calling(form)
    must, single = replace(may, must=True), replace(may, parallel=False)
    for calling in (may, must):
        assert accepts(calling, one)
        assert accepts(calling, two)
    assert accepts(single, one)
    assert not accepts(single, two)
    assert accepts(may, "Hello.")
    assert not accepts(must, "Hello.")
    for wrong in (Call("weather", "{}"), Call("then", "{}"), Call("weather", '{"city": 1}')):
        assert not accepts(may, form.written([wrong]))
        assert not accepts(must, form.written([wrong]))


@pytest.mark.parametrize("form", FORMS)
def test_beside_a_schema_an_answer_calls_or_is_of_that_form(form: ToolForm) -> None:
    schema: dict[str, JsonValue] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    calling = Calling(form)
    assert accepts(calling, '{"a": 3}', schema)
    assert accepts(calling, form.written([NOW]), schema)
    assert not accepts(calling, "Hello.", schema)


@pytest.mark.parametrize("form", FORMS)
def test_schemas_may_refer_to_their_definitions(form: ToolForm) -> None:
    where: JsonValue = {"enum": ["here", "there"]}
    schemas: dict[str, dict[str, JsonValue]] = {
        name: {
            "$defs": {"where": where if name == "go" else {"type": "integer"}},
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/where"}},
            "required": ["to"],
            "additionalProperties": False,
        }
        for name in ("go", "count")
    }
    calling = Calling(form)
    both = form.written([Call("go", '{"to": "there"}'), Call("count", '{"to": 3}')])
    assert accepts(calling, both, schemas=schemas)
    for call in (Call("go", '{"to": 3}'), Call("count", '{"to": "there"}')):
        assert not accepts(calling, form.written([call]), schemas=schemas)


def test_a_template_without_tools_gets_them_in_words() -> None:
    call: JsonValue = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages, listed = Traits(calls="text", results="user").in_its_terms(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "When?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "noon"},
            {"role": "tool", "tool_call_id": "b", "content": "UTC"},
        ],
        [{"type": "function", "function": {"name": "now"}}],
    )
    system, user, assistant, results = messages
    assert not listed
    assert str(system["content"]).startswith("Be brief.\n\n# Tools")
    assert '{"type": "function", "function": {"name": "now"}}' in str(system["content"])
    assert user == {"role": "user", "content": "When?"}
    assert whole(str(assistant["content"]), HERMES) == ("", [Call("now", '{"zone": "UTC"}')])
    assert results == {
        "role": "user",
        "content": "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nUTC\n</tool_response>",
    }
