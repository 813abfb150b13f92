"""The constraints of a request on its answer: OpenAI's `response_format` and `tools`, vLLM's `structured_outputs` and
`guided_*`, and `json_schema`, `regex`, `ebnf` and `grammar` of SGLang and llama.cpp."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pydantic import JsonValue

from service.api.schemas import ChatCompletionRequest, CompletionFields, ResponseFormat, StructuredOutputs, ToolChoice
from service.chat_template import HERMES
from service.errors import InvalidRequest
from service.grammars import Grammar, GrammarError, GrammarKind, as_lark
from service.runtime import Runtime
from service.schema_keywords import with_definitions
from service.thinking import Thinking
from service.tools import Calling

_ANY_OBJECT: JsonValue = {"type": "object"}
_NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}
_STRUCTURED = {name: name.rstrip("_") for name in ("json_", "json_object", "regex", "choice", "grammar")}


class Constraint(NamedTuple):
    """One constraint, and the field that sets it."""

    param: str
    kind: GrammarKind
    source: JsonValue


async def grammar_of(
    body: CompletionFields, calling: Calling | None, thinking: Thinking | None, runtime: Runtime
) -> Grammar | None:
    """The grammar of an answer; None: it is free. Raises InvalidRequest for several constraints, or an impossible
    one."""
    constraints = _constraints(body)
    if calling is not None:
        constraints = [await _with_calls(constraints, calling, runtime)]
    if not constraints:
        return None
    if len(constraints) > 1:
        names = " and ".join(f"'{constraint.param}'" for constraint in constraints)
        raise InvalidRequest(f"Only one of {names} can be honoured.", param=constraints[1].param)
    for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if given:
            raise InvalidRequest(f"'{name}' cannot be honoured beside '{constraints[0].param}'.", param=name)
    grammar = await compiled(constraints[0], runtime)
    if thinking is None:
        return grammar
    before = thinking.grammar(as_lark(constraints[0].kind, constraints[0].source), runtime.tokenizer.special_ids)
    return await compiled(Constraint(constraints[0].param, "lark", before), runtime)


async def compiled(constraint: Constraint, runtime: Runtime) -> Grammar:
    """Compile a constraint. Raises InvalidRequest naming the path in a schema."""
    try:
        return await runtime.off_loop(lambda: runtime.grammars.compile(constraint.kind, constraint.source))
    except GrammarError as error:
        path = ".".join((constraint.param, *error.path))
        raise InvalidRequest(f"Invalid value for '{path}': {error}.", param=path) from error


async def calling_of(body: ChatCompletionRequest, runtime: Runtime) -> Calling | None:
    """The functions that the answer may call. Raises InvalidRequest."""
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
            await compiled(Constraint(param, "json_schema", schema), runtime)
        else:
            schema, dropped = await runtime.off_loop(partial(runtime.grammars.relaxed, schema))
            relaxed += [".".join((param, *path)) for path in dropped]
        schemas[name] = schema
    traits = runtime.tokenizer.traits(with_tools=True)
    parallel = traits.calls != "one" if body.parallel_tool_calls is None else body.parallel_tool_calls
    if isinstance(choice, ToolChoice):
        if choice.function.name not in schemas:
            raise InvalidRequest(
                f"Invalid value for 'tool_choice': 'tools' has no function {choice.function.name!r}.",
                param="tool_choice",
            )
        schemas, parallel = {choice.function.name: schemas[choice.function.name]}, False
    return Calling(
        traits.form or HERMES,
        schemas,
        must=choice not in (None, "auto"),
        parallel=parallel,
        short_ids=traits.short_ids,
        relaxed=tuple(relaxed),
    )


async def _with_calls(constraints: list[Constraint], calling: Calling, runtime: Runtime) -> Constraint:
    """One constraint for answers that call functions, and for those that do not."""
    schema: dict[str, JsonValue] | None = None
    for constraint in constraints:
        if constraint.kind != "json_schema" or not isinstance(constraint.source, dict):
            raise InvalidRequest(f"'{constraint.param}' cannot be honoured beside 'tools'.", param=constraint.param)
        await compiled(constraint, runtime)
        schema = constraint.source
    return Constraint("tools", "lark", calling.grammar(schema, runtime.tokenizer.special_ids))


def _constraints(body: CompletionFields) -> list[Constraint]:
    """All constraints that a request sets, by any field."""
    structured = body.structured_outputs or StructuredOutputs()
    if body.structured_outputs is not None and not any(getattr(structured, name) for name in _STRUCTURED):
        message = f"'structured_outputs' must have one of {', '.join(_STRUCTURED.values())}."
        raise InvalidRequest(message, param="structured_outputs")
    fields: list[tuple[str, GrammarKind, Any]] = [
        *_of_format(body.response_format),
        ("structured_outputs.json", "json_schema", structured.json_),
        ("structured_outputs.json_object", "json_schema", _ANY_OBJECT if structured.json_object else None),
        ("structured_outputs.regex", "regex", structured.regex),
        ("structured_outputs.choice", "choice", structured.choice),
        ("structured_outputs.grammar", "grammar", structured.grammar),
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("grammar", "grammar", body.grammar),
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "grammar", body.ebnf),
    ]
    return [
        Constraint(param, kind, _parsed(source, param) if kind == "json_schema" else source)
        for param, kind, source in fields
        if source is not None
    ]


def _of_format(form: ResponseFormat | None) -> Iterator[tuple[str, GrammarKind, JsonValue]]:
    """The constraints of `response_format`."""
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


def _parsed(source: JsonValue, param: str) -> JsonValue:
    """A schema that may be sent as text."""
    if not isinstance(source, str):
        return source
    try:
        parsed: JsonValue = json.loads(source)
    except ValueError as error:
        raise InvalidRequest(f"Invalid value for '{param}': no valid JSON: {error}.", param=param) from error
    return parsed
