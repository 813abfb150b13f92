"""Traits of a chat template, detected at start-up by rendering small conversations, and adaptation of messages to them:
call ids in the required form, system text in a user turn, several calls as several turns."""

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product, takewhile
from typing import Any, Literal, NamedTuple

import pydantic_core
from pydantic import JsonValue

from service.errors import InvalidRequest, parsed_json, refuse_deep_json

Turn = dict[str, Any]
Write = Callable[[Sequence[Turn], Sequence[JsonValue]], str]
"""Renders turns and tools to text; returns an empty text if the template refuses them."""

CALL_BEGINS = '{"name": "'  # start of a call in the JSON form that grammars enforce
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_UNREADABLE = re.compile(r"'probe_key|\\+\"probe_key")
"""Signs that arguments have the wrong type for the template: a Python repr of an object, or text quoted twice."""
_TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query. Here are their signatures:
<tools>
{tools}
</tools>

For each call answer with a JSON object with the function's name and arguments within <tool_call> tags:
<tool_call>
{{"name": "function-name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


class Call(NamedTuple):
    """One function call, with its arguments as JSON text."""

    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Call syntax of a model family: `opening {"name": "NAME", "KEY": ARGUMENTS} (between {...})* closing`."""

    name: str
    marker: str  # substring that identifies the form in a chat template
    trigger: str  # text before calls, anywhere in an answer; empty: calls can only be at the start
    lead: str  # between trigger and first call
    between: str
    closing: str
    key: str = "arguments"

    @property
    def opening(self) -> str:
        """Text before the first call."""
        return self.trigger + self.lead

    def written(self, calls: Iterable[Call]) -> str:
        """Render calls as text in this syntax."""
        objects = (f'{CALL_BEGINS}{call.name}", "{self.key}": {call.arguments}}}' for call in calls)
        return self.opening + self.between.join(objects) + self.closing


HERMES = ToolForm("Hermes", "<tool_call>", "<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
"""Form of Hermes and Qwen, also used for models without training in function calls."""
MISTRAL = ToolForm("Mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", " [", ", ", "]")
LLAMA_3 = ToolForm("Llama 3", '"parameters"', "", "", "; ", "", key="parameters")


def form_of(template: str) -> ToolForm:
    """Return the call syntax of a chat template, or HERMES if the template has none that is known."""
    return next((form for form in (HERMES, MISTRAL, LLAMA_3) if form.marker in template), HERMES)


def past_arguments(text: str, param: str) -> tuple[str, JsonValue]:
    """Parse the arguments of a past call. Returns them as JSON text and as a value; truncated arguments are completed.
    Raises InvalidRequest naming the field `param`."""
    text = text or "{}"
    refuse_deep_json(text, param)  # also checks text that is cut, which parsed_json does not accept
    try:
        return text, parsed_json(text, param)
    except InvalidRequest:
        if not _is_cut(text):
            raise
        parsed: JsonValue = pydantic_core.from_json(text, allow_partial="trailing-strings")
        return json.dumps(parsed, ensure_ascii=False), parsed


def _is_cut(text: str) -> bool:
    """Whether the text is the start of a JSON object."""
    try:
        pydantic_core.from_json(text)
    except ValueError as error:
        return text.startswith("{") and str(error).startswith("EOF while parsing")
    return False


def short_id(call_id: str) -> str:
    """Map a call id to nine letters and digits: unchanged if it has this form, otherwise by a hash."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


@dataclass(frozen=True, slots=True)
class Traits:
    """Capabilities of a chat template, to which `in_its_terms` adapts conversations. It expects the arguments of past
    calls in the form `arguments`."""

    form: ToolForm | None = None
    """Call syntax of the template, or None if it does not list tools, which are then described in the system
    message."""
    parts: bool = False  # content must be a list of parts
    alternates: bool = False  # user and assistant must alternate, not counting calls and results
    opens_with_user: bool = False
    system: Literal["anywhere", "first", "last", "user"] = "anywhere"
    """Where system messages are rendered: anywhere, only as the first message, as the first if the user speaks last,
    or only inside a user turn."""
    calls: Literal["several", "one", "text"] = "several"  # text: it renders no past calls
    text_beside_calls: bool = True
    results: Literal["tool", "named", "user"] = "tool"
    """Role of results; "named": role `tool`, with the function's name."""
    arguments: Literal["object", "text"] = "object"
    short_ids: bool = False  # call ids must have nine letters and digits
    null_content: bool = False  # content must be None in a turn of calls without text
    keeps_thoughts: bool = False

    @property
    def described(self) -> str:
        """Traits on one line, for `adaptree doctor`."""
        turns = "user and assistant alternate" if self.alternates else "turns in any order"
        system = {"last": "first if the user speaks last", "user": "in a turn of the user"}.get(
            self.system, self.system
        )
        tools = "described in words" if self.form is None else f"in the form of {self.form.name}"
        calls = {"several": "several calls a turn", "one": "one call a turn", "text": "calls as text"}[self.calls]
        return (
            f"{turns}{', the user first' * self.opens_with_user}; system text {system}; tools {tools}; "
            f"{calls}{'' if self.text_beside_calls else ' without text'}, arguments as {self.arguments}, "
            f"ids {'of nine letters and digits' if self.short_ids else 'of any form'}; results by role "
            f"{'user' if self.results == 'user' else 'tool'}; thoughts {'kept' if self.keeps_thoughts else 'left out'}"
        )

    def in_its_terms(
        self, messages: Sequence[Mapping[str, JsonValue]], tools: Sequence[JsonValue]
    ) -> tuple[list[Turn], Sequence[JsonValue]]:
        """Adapt messages and tools to the template. Returns the turns and tools to render."""
        turns: list[Turn] = [dict(message) for message in messages]
        if tools and self.form is None:
            words = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
            turns.insert(0, {"role": "system", "content": _joined(system, words)})
            tools = ()
        turns = self._in_turn(self._with_system(list(self._with_calls(turns))))
        if self.parts:
            turns = [{**turn, "content": [{"type": "text", "text": turn["content"] or ""}]} for turn in turns]
        return turns, tools

    def _with_calls(self, turns: Sequence[Turn]) -> Iterator[Turn]:
        """Adapt calls and results."""
        for turn, results in _rounds(turns):
            if not turn.get("tool_calls"):
                yield from [turn] if turn else ()
                yield from self._results(results, {})
            elif self.calls == "text":
                yield self._as_text(turn)
                yield from self._results(results, {})
            else:
                yield from self._in_groups(turn, results)

    def _as_text(self, turn: Turn) -> Turn:
        """Move the calls of a turn into its text."""
        functions = (call["function"] for call in turn["tool_calls"])
        past = (Call(function["name"], function["arguments"]) for function in functions)
        text = turn["content"] or ""
        line_break = "\n" if text and not text.endswith("\n") else ""
        content = text + line_break + (self.form or HERMES).written(past)
        return {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": content}

    def _in_groups(self, turn: Turn, results: list[Turn]) -> Iterator[Turn]:
        """Split a turn of calls and its results if the template allows one call per turn, or no text beside calls."""
        calls = turn["tool_calls"]
        if turn["content"] and not self.text_beside_calls:
            yield {name: value for name, value in turn.items() if name != "tool_calls"}
            turn = {"role": "assistant", "content": ""}
        groups = [[call] for call in calls] if self.calls == "one" else [calls]
        by_call: dict[str, list[Turn]] = {}
        for result in results if len(groups) > 1 else ():
            by_call.setdefault(str(result.get("tool_call_id")), []).append(result)
        for group in groups[:-1]:
            yield from self._group(turn, group, by_call.pop(str(group[0]["id"]), []))
            turn = {"role": "assistant", "content": ""}
        left = results if len(groups) == 1 else [*chain.from_iterable(by_call.values())]
        yield from self._group(turn, groups[-1], left)

    def _group(self, turn: Turn, calls: Sequence[Any], results: Sequence[Turn]) -> Iterator[Turn]:
        """Yield one turn of calls, followed by its results."""
        names = {call["id"]: call["function"]["name"] for call in calls}
        shown = [{**call, "id": short_id(call["id"])} if self.short_ids else call for call in calls]
        content = turn["content"] or (None if self.null_content else "")
        yield {**turn, "content": content, "tool_calls": shown}
        yield from self._results(results, names)

    def _results(self, results: Sequence[Turn], names: Mapping[str, str]) -> Iterator[Turn]:
        """Adapt results of calls; `names`: function names by call id."""
        if self.results == "user" and results:
            texts = (f"<tool_response>\n{result['content']}\n</tool_response>" for result in results)
            yield {"role": "user", "content": "\n".join(texts)}
            return
        for result in results:
            call_id = str(result.get("tool_call_id"))
            named: Turn = {"name": names.get(call_id, "")} if self.results == "named" else {}
            shortened: Turn = {"tool_call_id": short_id(call_id)} if self.short_ids else {}
            yield {**named, **result, **shortened}

    def _with_system(self, turns: list[Turn]) -> list[Turn]:
        """Move system messages to where the template renders them; others become user turns."""
        if self.system == "anywhere":
            return turns
        leading = list(takewhile(lambda turn: turn["role"] == "system", turns))
        rest = [{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns[len(leading) :]]
        if not leading:
            return rest
        text = _joined(*(turn["content"] for turn in leading))
        if self.system == "first" or (self.system == "last" and rest and rest[-1]["role"] == "user"):
            return [{**leading[0], "content": text}, *rest]
        if rest and rest[0]["role"] == "user":
            return [{**rest[0], "content": _joined(text, rest[0]["content"])}, *rest[1:]]
        return [{"role": "user", "content": text}, *rest]

    def _in_turn(self, turns: list[Turn]) -> list[Turn]:
        """Make turns alternate as required: join neighbours of the same role, fill gaps with empty turns."""
        start = sum(1 for _ in takewhile(lambda turn: turn["role"] == "system", turns))
        has_user = any(turn["role"] == "user" for turn in turns)  # some templates list tools in the user turn
        opens = has_user and turns[start]["role"] == "user"
        if (self.opens_with_user and not opens) or (self.alternates and not has_user):
            turns = [*turns[:start], {"role": "user", "content": ""}, *turns[start:]]
        if not self.alternates:
            return turns
        ordered: list[list[Turn]] = []  # each group becomes one turn
        spoke = "assistant"
        for turn in turns:
            role = turn["role"]
            if role in ("user", "assistant") and not turn.get("tool_calls"):
                before = ordered[-1][0] if ordered else {}
                if role == spoke == before.get("role") and not before.get("tool_calls"):
                    ordered[-1].append(turn)
                    continue
                if role == spoke:
                    ordered.append([{"role": "user" if role == "assistant" else "assistant", "content": ""}])
                spoke = role
            ordered.append([turn])
        return [_as_one(group) for group in ordered]


def _as_one(turns: Sequence[Turn]) -> Turn:
    """Join neighbouring turns of one role."""
    if len(turns) == 1:
        return turns[0]
    texts = [name for name in ("content", "reasoning_content") if any(name in turn for turn in turns)]
    return turns[0] | {name: _joined(*(turn.get(name) for turn in turns)) for name in texts}


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[Turn, list[Turn]]]:
    """Yield each turn with the results that follow it; leading results follow an empty turn."""
    rest = deque(turns)
    while rest:
        turn = {} if rest[0]["role"] == "tool" else rest.popleft()
        results: list[Turn] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        yield turn, results


def _joined(*texts: str | None) -> str:
    """Join texts as paragraphs."""
    return "\n\n".join(text for text in texts if text)


def probe(write: Write, template: str) -> tuple[Traits, Traits]:
    """Detect the traits of a template. Returns its traits without tools and with tools."""
    native = Traits(form=form_of(template))
    without, beside = _Probe(write, ()), _Probe(write, (_TOOL,))
    for option in _options(native, parts=(False, True)):
        if "probe_tool" in write(*option.in_its_terms([_turn("user", 1)], (_TOOL,))):
            return without.traits(native), beside.traits(native)
    in_words = without.traits(Traits(calls="text", results="user", arguments="text"))
    return in_words, in_words


_WORD = re.compile(r"probe\w+")
_PARAMETERS: JsonValue = {"type": "object", "properties": {"a": {"type": "string", "description": "A text."}}}
_FUNCTION: JsonValue = {"name": "probe_tool", "description": "A tool.", "parameters": _PARAMETERS}
_TOOL: JsonValue = {"type": "function", "function": _FUNCTION}


class _Probe:
    """Detects traits by rendering small conversations with given tools."""

    def __init__(self, write: Write, tools: Sequence[JsonValue]) -> None:
        self._write = write
        self._tools = tools

    def traits(self, found: Traits) -> Traits:
        """Detect the traits one by one: each gets the first value with which its test conversation is rendered
        completely."""
        user, reply, system = (partial(_turn, role) for role in ("user", "assistant", "system"))
        found = self._first(_options(found, parts=(False, True)), [user(1)])
        several = [user(1), user(2), reply(3), reply(4), user(5)]
        found = self._first(_options(found, alternates=(False, True)), several)
        chat = [system(1), system(2), user(3), reply(4), system(5), user(6)]
        places = _options(found, system=("anywhere", "first", "last", "user"))
        found = self._first(places, chat, [*chat, reply(7)])
        begun, opened = [reply(1), user(2)], replace(found, opens_with_user=True)
        users = self._seen(found, [user(1), user(2)])
        knows_roles = found.alternates or not users or users != self._seen(found, begun)
        found = self._first([found, opened] if knows_roles else [opened, found], begun, [system(1)])
        if found.calls != "text":
            found = self._with_calls(found)
        thought: Turn = {**reply(2), "reasoning_content": "probe_thought"}
        return replace(found, keeps_thoughts=bool(self._seen(found, [user(1), thought])))

    def _with_calls(self, found: Traits) -> Traits:
        """Detect the traits of calls."""
        roles, either, user, reply = ("tool", "named", "user"), (False, True), _turn("user", 1), _turn("assistant", 2)
        native = _options(found, results=roles, arguments=("object", "text"), short_ids=either, null_content=either)
        in_text = _options(found, calls=("text",), results=roles, arguments=("text",), short_ids=either)
        for option in (*native, *in_text):
            seen = self._seen(option, [user, _asking(option, 1), _result(1), reply, _turn("user", 3)])
            if seen and (option.calls == "text" or not _UNREADABLE.search(seen)):
                found = option
                break
        if found.calls == "text":
            return found
        two = [user, _asking(found, 1, 2), _result(1), _result(2), reply]
        found = self._first(_options(found, calls=("several", "one")), two)
        text = [user, {**_asking(found, 1), "content": "probe_text"}, _result(1)]
        return self._first(_options(found, text_beside_calls=(True, False)), text)

    def _first(self, options: Sequence[Traits], *conversations: Sequence[Turn]) -> Traits:
        """Return the first option with which all conversations are rendered completely, or the first option if there is
        none."""
        whole = (option for option in options if all(self._seen(option, turns) for turns in conversations))
        return next(whole, options[0])

    def _seen(self, traits: Traits, turns: Sequence[Turn]) -> str:
        """Render turns. Returns an empty text if one of their words is missing."""
        text = self._write(*traits.in_its_terms(turns, self._tools))
        return text if all(word in text for word in _WORD.findall(json.dumps(turns))) else ""


def _options(traits: Traits, **values: Sequence[object]) -> list[Traits]:
    """Return the traits with each combination of values of these fields; the last field varies fastest."""
    combined: Iterable[tuple[Any, ...]] = product(*values.values())
    return [replace(traits, **dict(zip(values, chosen, strict=True))) for chosen in combined]


def _turn(role: str, number: int) -> Turn:
    return {"role": role, "content": f"probe{number}"}


def _asking(traits: Traits, *numbers: int) -> Turn:
    """Build a turn of calls with these numbers. Their ids have none of the forms that templates require."""
    parsed = {"probe_key": "probe_value"}
    arguments = parsed if traits.arguments == "object" else json.dumps(parsed)
    calls = [
        {"id": f"call-{n}", "type": "function", "function": {"name": f"probe_call{n}", "arguments": arguments}}
        for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(number: int) -> Turn:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": f"probe_result{number}"}
