"""What a request wants its answer to be: OpenAI's `response_format` and `tools`, vLLM's `structured_outputs` and
`guided_*`, and what SGLang and llama.cpp call `json_schema`, `regex`, `ebnf` and `grammar`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pydantic import JsonValue

from service.api.schemas import ChatCompletionRequest, CompletionFields, NamedTool, ResponseFormat, StructuredOutputs
from service.errors import InvalidRequest
from service.grammars import Grammar, GrammarError, GrammarKind, in_lark
from service.json_schemas import with_definitions
from service.runtime import Runtime
from service.thinking import Thinking
from service.tools import HERMES, Calling, form_of

_ANY_OBJECT: JsonValue = {"type": "object"}
_NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}
_STRUCTURED = {name: name.rstrip("_") for name in ("json_", "json_object", "regex", "choice", "grammar")}


class Wish(NamedTuple):
    """One form that the answer shall have."""

    param: str
    kind: GrammarKind
    source: JsonValue


async def grammar_of(
    body: CompletionFields, calling: Calling | None, thinking: Thinking | None, runtime: Runtime
) -> Grammar | None:
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
    grammar = await compiled(wishes[0], runtime)
    if thinking is None:
        return grammar
    before = thinking.before(in_lark(wishes[0].kind, wishes[0].source), runtime.tokenizer.special_ids)
    return await compiled(Wish(wishes[0].param, "lark", before), runtime)


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
    relaxed: list[str] = []
    for position, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters or _NO_ARGUMENTS
        if name in schemas:
            param = f"tools.{position}.function.name"
            raise InvalidRequest(f"Invalid value for '{param}': there are two functions {name!r}.", param=param)
        param, schema = f"tools.{position}.function.parameters", with_definitions(schema)
        if tool.function.strict:
            await compiled(Wish(param, "json_schema", schema), runtime)
        else:
            schema, dropped = await runtime.off_loop(partial(runtime.grammars.relaxed, schema))
            relaxed += [".".join((param, *path)) for path in dropped]
        schemas[name] = schema
    form = form_of(runtime.tokenizer.chat_template) or HERMES
    if isinstance(choice, NamedTool):
        if choice.function.name not in schemas:
            raise InvalidRequest(
                f"Invalid value for 'tool_choice': 'tools' has no function {choice.function.name!r}.",
                param="tool_choice",
            )
        chosen = {choice.function.name: schemas[choice.function.name]}
        return Calling(form, chosen, must=True, parallel=False, relaxed=tuple(relaxed))
    parallel = body.parallel_tool_calls is not False
    return Calling(form, schemas, must=choice == "required", parallel=parallel, relaxed=tuple(relaxed))


async def _with_calls(wishes: list[Wish], calling: Calling, runtime: Runtime) -> Wish:
    """One wish for calls, and for what the answer is where it calls nothing."""
    schema: dict[str, JsonValue] | None = None
    for wish in wishes:
        if wish.kind != "json_schema" or not isinstance(wish.source, dict):
            raise InvalidRequest(f"'{wish.param}' cannot be honoured beside 'tools'.", param=wish.param)
        await compiled(wish, runtime)
        schema = wish.source
    return Wish("tools", "lark", calling.grammar(schema, runtime.tokenizer.special_ids))


def _wishes(body: CompletionFields) -> list[Wish]:
    """All that the answer shall be, by whichever field."""
    structured = body.structured_outputs or StructuredOutputs()
    if body.structured_outputs is not None and not any(getattr(structured, name) for name in _STRUCTURED):
        message = f"'structured_outputs' must have one of {', '.join(_STRUCTURED.values())}."
        raise InvalidRequest(message, param="structured_outputs")
    fields: list[tuple[str, GrammarKind, JsonValue]] = [
        *_of_format(body.response_format),
        ("structured_outputs.json", "json_schema", structured.json_),
        ("structured_outputs.json_object", "json_schema", _ANY_OBJECT if structured.json_object else None),
        ("structured_outputs.regex", "regex", structured.regex),
        ("structured_outputs.choice", "choice", _list(structured.choice)),
        ("structured_outputs.grammar", "grammar", structured.grammar),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", _list(body.guided_choice)),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("grammar", "grammar", body.grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "grammar", body.ebnf),
    ]
    return [
        Wish(param, kind, _parsed(source, param) if kind == "json_schema" else source)
        for param, kind, source in fields
        if source is not None
    ]


def _of_format(form: ResponseFormat | None) -> Iterator[tuple[str, GrammarKind, JsonValue]]:
    """OpenAI's form, and a schema beside `json_object`."""
    if form is None:
        return
    named = None if form.json_schema is None else form.json_schema.schema_ or _ANY_OBJECT
    given: dict[str, JsonValue] = {"response_format.json_schema.schema": named, "response_format.schema": form.schema_}
    schemas: dict[str, JsonValue] = {param: schema for param, schema in given.items() if schema is not None}
    if form.type == "text":
        for param in schemas:
            raise InvalidRequest(f"'{param}' cannot be honoured beside the type 'text'.", param=param)
        return
    if form.type == "json_schema" and not schemas:
        param = "response_format.json_schema"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    for param, schema in schemas.items():
        yield param, "json_schema", schema
    if not schemas:
        yield "response_format", "json_schema", _ANY_OBJECT


def _list(choices: Sequence[str] | None) -> JsonValue:
    return None if choices is None else list(choices)


def _parsed(source: JsonValue, param: str) -> JsonValue:
    """A schema may come as text."""
    if not isinstance(source, str):
        return source
    try:
        parsed: JsonValue = json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"Invalid value for '{param}': no valid JSON: {error}.", param=param) from error
    return parsed
