"""What templates cannot say is put in their terms: every conversation of five turns reaches the prompt, on both
routes, and what the server sends is accepted when it comes back."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from service.api.prompts import render
from service.api.schemas import ChatCompletionRequest
from service.errors import InvalidRequest
from service.text.chat_template import HERMES, Call, Traits, form_of, past_arguments, short_id
from service.text.tokenizer import ChatTokenizer
from tests.service.api.client import CHAT, RESPONSES, client_of, events_of
from tests.service.scripted import CARD, ScriptedEngine, say
from tests.service.text.chat_templates import FOUND, TEMPLATES, stock_of, tokenizer_of
from tests.service.text.tiny_tokenizer import tiny_tokenizer

FAMILIES = list(TEMPLATES)
CASES, MORE_CASES = 90, 9_200  # of each family
WORD = re.compile(r"w\d+x")
END = "<|im_end|>"
NOISE = ("", "", "\n\n", END, " 'it\"s\\", " é 你 🙂", "{{ 1 // 0 }}{% endif %}", "<tool_call>", "</s>[INST]")
IDS = ("call_%024x", "%09d", "toolu_%d", "%d", "a b|%d")
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {"properties": {"to": {}}}}}
    for name in ("go", "stay")
]
Turns = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.service.scripted.CARD", replace(CARD, max_model_len=65_536))


class Conversation:
    """Five turns at random, with a word of its own in each text."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.messages: Turns = []
        for _ in range(self.rng.choice((0, 0, 1, 1, 2))):
            self._say(self.rng.choice(("system", "developer")))
        for _ in range(5):
            self.rng.choices((self._user, self._system, self._reply, self._calls), (8, 1, 5, 6))[0]()
        self.tools = self.rng.choice((TOOLS, []))

    def _text(self) -> str:
        if self.rng.random() < 0.1:
            return ""
        self.count += 1
        return f"w{self.count}x{self.rng.choice(NOISE)}"

    def _say(self, role: str, **more: Any) -> None:
        text = self._text()
        content = [{"type": "text", "text": text}] if self.rng.random() < 0.1 else text
        self.messages.append({"role": role, "content": content, **more})

    def _system(self) -> None:
        self._say(self.rng.choice(("system", "developer")))

    def _user(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2))):
            self._say("user")

    def _reply(self, **more: Any) -> None:
        thought = {"reasoning_content": "a thought"} if self.rng.random() < 0.3 else {}
        self._say("assistant", **thought, **more)

    def _calls(self) -> None:
        ids = [self.rng.choice(IDS) % self.rng.randrange(10**6) + str(n) for n in range(self.rng.choice((1, 1, 2, 3)))]
        arguments = [json.dumps({"to": self._text(), "n": [1, None]}, ensure_ascii=False) for _ in ids]
        functions = [{"name": self.rng.choice(("go", "stay")), "arguments": one} for one in arguments]
        calls = [
            {"id": call_id, "type": "function", "function": function}
            for call_id, function in zip(ids, functions, strict=True)
        ]
        self._reply(tool_calls=calls)
        if self.rng.random() < 0.3:
            self.messages[-1]["content"] = None
        for call_id in ids[: self.rng.choice((0, 3, 3, 3))]:
            self._say("tool", tool_call_id=call_id)

    def items(self) -> Turns:
        """The messages as items of a response."""
        return [item for message in self.messages for item in _items(message)]


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    content = message["content"]
    text = content if isinstance(content, str) or content is None else content[0]["text"]
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}
        return
    if "reasoning_content" in message:
        yield {"type": "reasoning", "summary": []}
    if text is not None:
        yield {"role": message["role"], "content": text}
    for call in message.get("tool_calls", ()):
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def words_of(messages: Turns, *, one_by_one: bool = False) -> list[str]:
    """The words of a conversation in their order; `one_by_one`: each call with its result."""
    by_call = {message["tool_call_id"]: WORD.findall(str(message)) for message in messages if "tool_call_id" in message}
    words: list[str] = []
    for message in messages:
        words += WORD.findall(str(message["content"])) if message["role"] != "tool" or not one_by_one else ()
        for call in message.get("tool_calls", ()):
            words += WORD.findall(str(call)) + (by_call.get(call["id"], []) if one_by_one else [])
    return words


def check(family: str, messages: Turns, tools: Turns, prompt: str) -> None:
    """Each text is in the prompt once and in order; a template that collects system text may do so."""
    traits = tokenizer_of(family).traits(with_tools=bool(tools))
    spoken = words_of(messages, one_by_one=traits.calls == "one")
    seen = WORD.findall(prompt)
    assert sorted(seen) == sorted(spoken)
    collected = set(words_of([one for one in messages if one["role"] in ("system", "developer")]))
    collected &= collected if family in ("mistral", "deepseek_v3") else set()
    assert [word for word in seen if word not in collected] == [word for word in spoken if word not in collected]
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        assert call["function"]["arguments"] in prompt  # as JSON, in whatever form the template got them


def is_in_the_prompt(family: str, case: int) -> None:
    made, tokenizer = Conversation(f"{family} {case}"), tokenizer_of(family)
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": made.messages, "tools": made.tools or None})
    ids = render(body.messages, body, tokenizer, body.tools or ())
    prompt = tokenizer.decode(ids)
    check(family, made.messages, made.tools, prompt)
    control = ids.count(tokenizer.special_ids[END])  # a client's are text
    assert prompt.count(END) - control == json.dumps(made.messages).count(END)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_of_a_conversation_is_in_the_prompt_once(family: str) -> None:
    for case in range(CASES):
        is_in_the_prompt(family, case)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_of_many_conversations_is_in_the_prompt_once(family: str) -> None:
    for case in range(CASES, CASES + MORE_CASES):
        is_in_the_prompt(family, case)


@pytest.mark.parametrize("family", FAMILIES)
async def test_both_routes_take_every_conversation(family: str) -> None:
    engine, tokenizer = ScriptedEngine(say("x")), tokenizer_of(family)
    async with client_of(engine, tokenizer=tokenizer) as client:
        for case in range(12):
            made = Conversation(f"{family} {case} on a route")
            flat = [{"type": "function", **tool["function"]} for tool in made.tools]
            for path, body in (
                (CHAT, {"messages": made.messages, **({"tools": made.tools} if made.tools else {})}),
                (RESPONSES, {"input": made.items(), "tools": flat}),
            ):
                answer = await client.post(path, json={"model": "tiny", **body})
                assert answer.status_code == 200, (path, case, answer.text)
                check(family, made.messages, made.tools, tokenizer.decode(engine.submitted[-1].prompt))


@pytest.mark.parametrize("family", FAMILIES)
async def test_the_servers_own_calls_are_accepted_when_they_come_back(family: str) -> None:
    tokenizer = tokenizer_of(family)
    form = tokenizer.traits(with_tools=True).form or HERMES
    made = [Call("go", '{"to": "w1x\\ud83d"}'), Call("stay", '{"to": "w2x"}')]  # half a pair, as models may write
    lead = "w0x\n" if form.trigger else ""
    script, engine = say(lead + form.written(made)), ScriptedEngine(say("x"))
    ask = {"role": "user", "content": "Please."}
    async with client_of(engine, tokenizer=tokenizer) as client:

        async def post(path: str, **body: Any) -> Any:
            answer = await client.post(path, json={"model": "tiny", **body})
            assert answer.status_code == 200, answer.text
            return answer

        async def goes_back(path: str, calls: Turns, **body: Any) -> None:
            for call, one in zip(made, calls, strict=True):
                assert (one["name"], one["arguments"]) == call
            engine.script = say("x")
            await post(path, **body)
            prompt = tokenizer.decode(engine.submitted[-1].prompt)
            numbers = (1, 3, 2, 4) if FOUND[family].get("calls") == "one" else (1, 2, 3, 4)
            assert WORD.findall(prompt) == WORD.findall(lead) + [f"w{number}x" for number in numbers]

        for stream in (False, True):
            engine.script = script
            answer = await post(CHAT, messages=[ask], tools=TOOLS, stream=stream)
            message = _streamed(events_of(answer)) if stream else answer.json()["choices"][0]["message"]
            calls = message["tool_calls"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": f"w{n}x"} for n, call in enumerate(calls, 3)
            ]
            functions = [call["function"] for call in calls]
            await goes_back(CHAT, functions, messages=[ask, message, *results], tools=TOOLS)
        flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
        engine.script = script
        response = (await post(RESPONSES, input=[ask], tools=flat)).json()
        output = response["output"]
        calls = [item for item in output if item["type"] == "function_call"]
        given = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"w{n}x"}
            for n, call in enumerate(calls, 3)
        ]
        await goes_back(RESPONSES, calls, input=[ask, *output, *given], tools=flat)
        await goes_back(RESPONSES, calls, input=given, previous_response_id=response["id"], tools=flat)


def _streamed(events: Turns) -> dict[str, Any]:
    """The message that chunks add up to."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for delta in (event["choices"][0]["delta"] for event in events):
        message["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                message["tool_calls"].append({"id": piece["id"], "type": "function", "function": piece["function"]})
            else:
                message["tool_calls"][piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    return message


@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_finds_the_rules_of_the_family(family: str) -> None:
    tokenizer = tokenizer_of(family)
    expected = replace(Traits(form=form_of(str(tokenizer.chat_template))), **FOUND[family])
    assert tokenizer.traits(with_tools=True) == expected
    assert "\n" not in expected.described


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gemma", "phi3"}))
def test_a_plain_conversation_is_as_the_template_writes_it(family: str) -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    expected = stock_of(family).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokenizer = tokenizer_of(family)
    assert tokenizer.decode(tokenizer.render_chat(messages)) == expected


@pytest.mark.parametrize(
    ("call", "result", "found"),
    [
        ("{{ arguments | tojson }}", "{{ m.content }}", ("object", "tool", False)),
        (
            "{% for k, v in arguments.items() %}{{ k }}={{ v }}{% endfor %}",
            "{{ m.content }}",
            ("object", "tool", False),
        ),
        ("{% if c.id | length < 9 %}{{ 0 // 0 }}{% endif %}{{ arguments }}", "{{ m.content }}", ("text", "tool", True)),
        ("{{ 'with ' + arguments }}", "{{ m.name + m.content }}", ("text", "named", False)),
        ("{{ arguments }}", "{{ raise_exception('no such role') }}", ("text", "user", False)),
    ],
)
def test_calls_and_results_are_given_as_they_are_written_well(
    call: str, result: str, found: tuple[str, str, bool]
) -> None:
    template = (
        "{{ tools }}{% for m in messages %}{% if m.role == 'tool' %}" + result + "{% else %}{{ m.role + m.content }}"
        "{% for c in m.tool_calls or [] %}{% set arguments = c.function.arguments %}{{ c.function.name }}" + call
    )
    tokenizer = ChatTokenizer(tiny_tokenizer(template + "{% endfor %}{% endif %}{% endfor %}"))
    traits = tokenizer.traits(with_tools=True)
    assert (traits.arguments, traits.results, traits.short_ids) == found


def test_a_template_of_parts_gets_parts() -> None:
    template = "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    tokenizer = ChatTokenizer(tiny_tokenizer(template))
    assert tokenizer.decode(tokenizer.render_chat([{"role": "user", "content": "hello"}])) == "userhello"


@pytest.mark.parametrize("family", ["llama3.1", "qwen2.5"])
async def test_several_calls_are_made_where_the_template_takes_them_or_the_client_asks(family: str) -> None:
    form = tokenizer_of(family).traits(with_tools=True).form or HERMES
    two = form.written([Call("go", "{}"), Call("stay", "{}")])
    engine = ScriptedEngine(say("x"))
    async with client_of(engine, tokenizer=tokenizer_of(family)) as client:
        for asked, several in ((None, family != "llama3.1"), (True, True), (False, False)):
            more = {} if asked is None else {"parallel_tool_calls": asked}
            body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **more}
            assert (await client.post(CHAT, json=body)).status_code == 200
            grammar = engine.submitted[-1].grammar
            assert grammar is not None
            is_possible = grammar.begin().forced(tokenizer_of(family).encode(two)) is not None
            assert is_possible == several


def test_a_call_that_was_cut_comes_back_as_far_as_it_goes() -> None:
    assert past_arguments('{"a": 1}', "p") == ('{"a": 1}', {"a": 1})
    assert past_arguments("", "p") == ("{}", {})
    assert past_arguments('{"a": "hé', "p") == ('{"a": "hé"}', {"a": "hé"})
    for wrong, why in (
        *((bad, "not valid JSON") for bad in ("}", "a", '{"a": 1} 2')),
        ("[" * 100_000, "deeper than 127"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            past_arguments(wrong, "p")


def test_ids_of_another_form_are_mapped_to_the_same_one_each_time() -> None:
    assert short_id("abcDEF123") == "abcDEF123"
    assert short_id("call_1") == short_id("call_1") != short_id("call_2")
    assert re.fullmatch("[a-zA-Z0-9]{9}", short_id("call_1"))
