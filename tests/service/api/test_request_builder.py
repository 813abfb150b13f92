import logging
from dataclasses import replace
from typing import Any

import pytest

from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import ASK, CHAT, TEXT, client_of, error_of, post
from tests.service.scripted import CARD, TOKENIZER, ScriptedEngine, say

PROMPT = TOKENIZER.render_chat([{"role": "user", "content": "hello"}])
ROOM = CARD.max_model_len - len(PROMPT)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **fields}}


NOW = function()
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "}"}}],
}


async def built(**fields: Any) -> Any:
    """The engine's request for a body."""
    engine = ScriptedEngine(say("x"))
    response = await post(engine, **fields)
    assert response.status_code == 200, response.text
    return engine.submitted[0]


async def test_defaults() -> None:
    request = await built()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.stop, sampling.num_logprobs) == (min(ROOM, 40), (), None)
    assert (request.n, request.store, request.prediction) == (1, True, ())
    assert 0 <= sampling.seed < 2**63


@pytest.mark.parametrize("word", ["the ", "\u00e9\U0001f600"])
async def test_of_a_prediction_as_many_tokens_are_read_as_the_answer_may_have(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, encode, lengths = ScriptedEngine(say("x")), ChatTokenizer.encode, list[int]()

    def measured(self: ChatTokenizer, text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(ChatTokenizer, "encode", measured)
    text = word * (2**22 // len(word.encode()))
    async with client_of(engine, max_request_bytes=2**23) as client:
        for most in (1, 7, 40):
            body = {**ASK, "prediction": {"type": "content", "content": text}, "max_tokens": most}
            assert (await client.post(CHAT, json=body)).status_code == 200
    assert [list(request.prediction) for request in engine.submitted] == [
        TOKENIZER.encode(text[:200])[:n] for n in (1, 7, 40)
    ]
    assert max(lengths) < 10_000


async def test_no_prediction_is_read_where_nothing_drafts_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, reads_predictions=False))
    assert (await built(prediction={"type": "content", "content": "the"})).prediction == ()


async def test_every_field_arrives() -> None:
    request = await built(
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"3": -100, "1": 5.5},
        seed=-(2**63),
        n=8,
        max_completion_tokens=9,
        max_tokens=3,
        min_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=True,
        prediction={"type": "content", "content": [{"type": "text", "text": "the"}]},
        speculation={"enabled": False, "max_budget": 0},
        store=False,
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.5, 7, 0.25)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == ((1, 5.5), (3, -100))
    assert (sampling.seed, request.n, sampling.max_tokens, sampling.min_tokens) == (-(2**63), 8, 9, 2)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), frozenset({5}))
    assert (sampling.include_stop_str_in_output, sampling.ignore_eos, sampling.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert sampling.num_logprobs == 0
    assert list(request.prediction) == TOKENIZER.encode("the")
    assert (request.speculation.enabled, request.speculation.max_budget) == (False, 0)
    assert request.store is False


@pytest.mark.parametrize("top_k", [-1, 0])
async def test_both_ways_to_switch_top_k_off(top_k: int) -> None:
    assert (await built(top_k=top_k)).sampling.top_k == 0


@pytest.mark.parametrize(("asked", "used"), [(0, 0.0), (1e-300, 0.01), (0.02, 0.02)])
async def test_temperatures_stay_within_what_the_sampler_can_count_with(asked: float, used: float) -> None:
    assert (await built(temperature=asked)).sampling.temperature == used


async def test_null_means_absent() -> None:
    fields = ("temperature", "top_p", "n", "stop", "max_tokens", "tools", "response_format", "store", "stream", "audio")
    assert (await built(**dict.fromkeys(fields))).sampling.temperature == 1.0


async def test_messages_reach_the_template_as_text() -> None:
    request = await built(
        messages=[
            {"role": "developer", "content": "the"},
            {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}], "name": "w"},
            {"role": "assistant", "content": "w", "refusal": None, "tool_calls": [], "audio": None},
        ],
        add_generation_prompt=False,
    )
    spoken = [("system", "the"), ("user", "he\nllo"), ("assistant", "w")]
    shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in spoken)
    assert TOKENIZER.decode(request.prompt) == shown


async def test_continue_final_message_and_template_variables() -> None:
    request = await built(continue_final_message=True, chat_template_kwargs={"greeting": "unused when cut"})
    assert TOKENIZER.decode(request.prompt) == "<|im_start|>user\nhello"


async def test_harmless_values_are_accepted() -> None:
    await built(
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        parallel_tool_calls=True,
        echo=False,
        reasoning_effort="high",
        verbosity="low",
        thinking={"type": "enabled"},
        typical_p=1,
        mirostat=0,
        dry_multiplier=0.0,
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"grammar": "no grammar {"}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"logit_bias": {"1000000": 1}}, "logit_bias.1000000"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": {}}, "stop"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"resume_from": {}}, "resume_from"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"structural_tag": {}}, "structural_tag"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "response_format.json_schema.shema",
        ),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "true"}, "stream"),
        ({"speculation": {"max_budget": -1}}, "speculation.max_budget"),
        ({"speculation": {"trace": "yes"}}, "speculation.trace"),
        ({"prediction": {"type": "x", "content": "y"}}, "prediction.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
        ({"messages": "hello"}, "messages"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"model": 5}, "model"),
        ({"tools": [NOW, NOW]}, "tools.1.function.name"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}}, "tool_choice"),
        ({"tools": [function(parameters={"type": "x"}, strict=True)]}, "tools.0.function.parameters"),
        ({"tools": [NOW], "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "(", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"items": {"not": {"pattern": "a"}}}}, "guided_json.items"),
        ({"guided_choice": ["a"], "min_tokens": 3}, "min_tokens"),
        ({"messages": [CALLED]}, "messages.0.tool_calls.0.function.arguments"),
    ],
)
async def test_refusals_name_the_field(fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, max_model_len=1024))  # room for functions
    engine = ScriptedEngine(say("x"))
    response = await post(engine, **fields)
    error = error_of(response)
    assert (response.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert engine.submitted == []


async def test_an_unknown_model_is_not_found() -> None:
    response = await post(ScriptedEngine(say("x")), model="gpt-9")
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


@pytest.mark.parametrize("field", ["model", "messages"])
async def test_missing_fields(field: str) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        body = {key: value for key, value in ASK.items() if key != field}
        error = error_of(await client.post("/v1/chat/completions", json=body))
    assert error["message"] == f"Missing required parameter: '{field}'."


async def test_a_prompt_longer_than_the_context() -> None:
    long = [{"role": "user", "content": "x" * 100}]
    tokens = len(TOKENIZER.render_chat(long))
    error = error_of(await post(ScriptedEngine(say("x")), messages=long))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"] == (
        f"This model's maximum context length is 64 tokens. However, your messages resulted in {tokens} tokens. "
        "Please reduce the length of the messages."
    )


@pytest.mark.parametrize(("cap", "granted"), [(None, ROOM), (7, 7)])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_longer_than_the_context_is_cut(field: str, cap: int | None, granted: int) -> None:
    engine = ScriptedEngine(say("x"))
    async with client_of(engine, max_output_tokens=cap) as client:
        response = await client.post("/v1/chat/completions", json={**ASK, field: 65535, "min_tokens": 60})
    assert response.status_code == 200
    sampling = engine.submitted[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (granted, min(60, granted))


async def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(ScriptedEngine(say("x"))) as client:
        with caplog.at_level(logging.WARNING, logger="service.api"):
            for _ in range(2):
                response = await client.post("/v1/chat/completions", json={**ASK, "sparkle": 1})
                assert response.status_code == 200
    assert [record.getMessage() for record in caplog.records] == ["ignoring the unknown request field 'sparkle'"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop": ["x"] * 17}, "at most 16 items"),
        ({"stop": ""}, "at least 1 character"),
        ({"messages": [{"role": "user", "content": []}]}, "at least 1 item"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a string, not null"),
        ({"audio": {"voice": "x"}}, "does not support 'audio'."),
        ({"modalities": ["audio"]}, "does not support 'modalities' with this value."),
    ],
)
async def test_refusals_speak_of_what_was_meant(fields: dict[str, Any], words: str) -> None:
    response = await post(ScriptedEngine(say("x")), **fields)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_a_grammar_goes_with_the_request() -> None:
    for fields in ({"grammar": 'root ::= "a"'}, {"guided_choice": ["a"]}, {"response_format": {"type": "json_object"}}):
        assert (await built(**fields)).grammar is not None
    assert (await built(response_format={"type": "text"})).grammar is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": " a" * 2_000_000}, "prompt"),
        (TEXT, {"prompt": ["a", " a" * 2_000_000]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": " a" * 2_000_000}]}, "messages"),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with client_of(ScriptedEngine(say("x")), max_request_bytes=5_000_000) as client:
        response = await client.post(path, json={"model": "tiny", **body})
    error = error_of(response)
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert "4000" in error["message"], "characters: no token was counted"
