"""What a request wants its answer to be: OpenAI's `response_format` and `tools`, vLLM's `structured_outputs` and
`guided_*`."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import JsonValue

from service.api.schemas import ChatCompletionRequest, NamedTool, SamplingFields
from service.engine.grammar import Grammar
from service.errors import InvalidRequest
from service.grammars import GrammarError, GrammarKind
from service.runtime import Runtime
from service.tools import HERMES, Calling, form_of

_ANY_OBJECT: JsonValue = {"type": "object"}
_NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}


class Wish(NamedTuple):
    """One form that the answer shall have."""

    param: str
    kind: GrammarKind
    source: JsonValue


async def grammar_of(body: SamplingFields, calling: Calling | None, runtime: Runtime) -> Grammar | None:
    """Raises InvalidRequest for more than one wish, and for one that cannot be honoured."""
    wishes = _wishes(body)
    if calling is not None:
        wishes = [await _with_calls(wishes, calling, runtime)]
    if not wishes:
        return None
    if len(wishes) > 1:
        names = " and ".join(f"'{wish.param}'" for wish in wishes)
        raise InvalidRequest(f"Only one of {names} can be honoured.", param=wishes[1].param)
    for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if given:
            raise InvalidRequest(f"'{name}' cannot be honoured beside '{wishes[0].param}'.", param=name)
    return await compiled(wishes[0], runtime)


async def compiled(wish: Wish, runtime: Runtime) -> Grammar:
    """Raises InvalidRequest naming the place in a schema."""
    try:
        return await runtime.off_loop(lambda: runtime.grammars.compile(wish.kind, wish.source))
    except GrammarError as error:
        path = ".".join((wish.param, *error.path))
        raise InvalidRequest(f"Invalid value for '{path}': {error}.", param=path) from error


async def calling_of(body: ChatCompletionRequest, runtime: Runtime) -> Calling | None:
    """What the answer may call. Raises InvalidRequest."""
    tools, choice = body.tools, body.tool_choice
    if tools is None and choice not in (None, "none"):
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    if tools is None or choice == "none":
        return None
    schemas: dict[str, Mapping[str, JsonValue]] = {}
    for position, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters or _NO_ARGUMENTS
        if name in schemas:
            param = f"tools.{position}.function.name"
            raise InvalidRequest(f"Invalid value for '{param}': there are two functions {name!r}.", param=param)
        await compiled(Wish(f"tools.{position}.function.parameters", "json_schema", schema), runtime)
        schemas[name] = schema
    form = form_of(runtime.tokenizer.chat_template) or HERMES
    if isinstance(choice, NamedTool):
        if choice.function.name not in schemas:
            raise InvalidRequest(
                f"Invalid value for 'tool_choice': 'tools' has no function {choice.function.name!r}.",
                param="tool_choice",
            )
        chosen = {choice.function.name: schemas[choice.function.name]}
        return Calling(form, chosen, must=True, parallel=False)
    return Calling(form, schemas, must=choice == "required", parallel=body.parallel_tool_calls is not False)


async def _with_calls(wishes: list[Wish], calling: Calling, runtime: Runtime) -> Wish:
    """One wish for calls, and for what the answer is where it calls nothing."""
    schema: dict[str, JsonValue] | None = None
    for wish in wishes:
        if wish.kind != "json_schema" or not isinstance(wish.source, dict):
            raise InvalidRequest(f"'{wish.param}' cannot be honoured beside 'tools'.", param=wish.param)
        await compiled(wish, runtime)
        schema = wish.source
    return Wish("tools", "lark", calling.grammar(schema, runtime.tokenizer.special_ids))


def _wishes(body: SamplingFields) -> list[Wish]:
    structured, form = body.structured_outputs, body.response_format
    found: list[Wish] = []
    if form is not None and form.type == "json_object":
        found.append(Wish("response_format", "json_schema", _ANY_OBJECT))
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise InvalidRequest(
                "Missing required parameter: 'response_format.json_schema'.", param="response_format.json_schema"
            )
        schema = form.json_schema.schema_
        found.append(
            Wish("response_format.json_schema.schema", "json_schema", _ANY_OBJECT if schema is None else schema)
        )
    if structured is not None and structured.json_object:
        found.append(Wish("structured_outputs.json_object", "json_schema", _ANY_OBJECT))
    more: list[tuple[str, GrammarKind, str, JsonValue]] = [
        ("json", "json_schema", "guided_json", body.guided_json),
        ("regex", "regex", "guided_regex", body.guided_regex),
        ("choice", "choice", "guided_choice", list[JsonValue](body.guided_choice) if body.guided_choice else None),
        ("grammar", "grammar", "guided_grammar", body.guided_grammar),
        ("", "grammar", "grammar", body.grammar),
    ]
    for name, kind, older, value in more:
        asked = getattr(structured, "json_" if name == "json" else name, None) if name else None
        for param, source in ((f"structured_outputs.{name}", asked), (older, value)):
            if source is not None:
                found.append(Wish(param, kind, _parsed(source, param) if kind == "json_schema" else source))
    return found


def _parsed(source: JsonValue, param: str) -> JsonValue:
    """A schema may come as text."""
    if not isinstance(source, str):
        return source
    try:
        parsed: JsonValue = json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"Invalid value for '{param}': no valid JSON: {error}.", param=param) from error
    return parsed
