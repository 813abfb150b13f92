"""The constraints of a request on its answer: OpenAI's `response_format` and `tools`, vLLM's `structured_outputs` and
`guided_*`, and `json_schema`, `regex`, `ebnf` and `grammar` of SGLang and llama.cpp."""

from collections.abc import Awaitable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from pydantic import JsonValue

from service.api.schemas import ChatCompletionRequest, CompletionFields, ResponseFormat, StructuredOutputs, ToolChoice
from service.errors import InvalidRequest, parsed_json
from service.text.chat_template import HERMES
from service.text.grammar_pool import Compilations
from service.text.grammars import Grammar, GrammarError, GrammarKind, Result, Steps, as_lark
from service.text.thinking import Thinking
from service.text.tokenizer import ChatTokenizer
from service.text.tools import Calling

_ANY_OBJECT: JsonValue = {"type": "object"}
_NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}
_STRUCTURED = {name: name.rstrip("_") for name in ("json_", "json_object", "regex", "choice", "grammar")}


class Constraint(NamedTuple):
    """One constraint, and the field that sets it."""

    param: str
    kind: GrammarKind
    source: JsonValue


async def grammar_of(
    body: CompletionFields,
    calling: Calling | None,
    thinking: Thinking | None,
    tokenizer: ChatTokenizer,
    compilations: Compilations,
) -> Grammar | None:
    """The grammar of an answer; None: it is free. Raises InvalidRequest for several constraints, or an impossible
    one."""
    constraints = [await _parsed(constraint, compilations) for constraint in _constraints(body)]
    if calling is not None:
        constraints = [await _with_calls(constraints, calling, tokenizer, compilations)]
    if not constraints:
        return None
    if len(constraints) > 1:
        names = " and ".join(f"'{constraint.param}'" for constraint in constraints)
        raise InvalidRequest(f"Only one of {names} can be honoured.", param=constraints[1].param)
    for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if given:
            raise InvalidRequest(f"'{name}' cannot be honoured beside '{constraints[0].param}'.", param=name)
    grammar = await compiled(constraints[0], compilations)
    if thinking is None:
        return grammar

    def after_a_thought() -> Steps[str]:
        yield
        return thinking.grammar(as_lark(constraints[0].kind, constraints[0].source), tokenizer.special_ids)

    param = constraints[0].param
    written = await _refused_at(param, compilations.taken(after_a_thought()))
    return await compiled(Constraint(param, "lark", written), compilations)


async def compiled(constraint: Constraint, compilations: Compilations) -> Grammar:
    """Compile a constraint. Raises InvalidRequest naming the path in a schema."""
    param, kind, source = constraint
    steps = partial(compilations.compiler.compiling, kind, source)
    return await _refused_at(param, compilations.result(kind, source, steps))


async def _refused_at(param: str, work: Awaitable[Result]) -> Result:
    """What the work for a field makes. Raises InvalidRequest naming the path in it."""
    try:
        return await work
    except GrammarError as error:
        path = ".".join((param, *error.path))
        raise InvalidRequest(f"Invalid value for '{path}': {error}.", param=path) from error


async def calling_of(
    body: ChatCompletionRequest, tokenizer: ChatTokenizer, compilations: Compilations
) -> Calling | None:
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
        param, strict = f"tools.{position}.function.parameters", tool.function.strict is True
        steps = partial(compilations.compiler.fitting, schema, strict=strict)
        fitting = compilations.result("strict" if strict else "fitting", schema, steps)
        schemas[name], dropped = await _refused_at(param, fitting)
        relaxed += [".".join((param, *path)) for path in dropped]
    traits = tokenizer.traits(with_tools=True)
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


async def _with_calls(
    constraints: list[Constraint], calling: Calling, tokenizer: ChatTokenizer, compilations: Compilations
) -> Constraint:
    """One constraint for answers that call functions, and for those that do not."""
    schema: dict[str, JsonValue] | None = None
    for constraint in constraints:
        if constraint.kind != "json_schema" or not isinstance(constraint.source, dict):
            raise InvalidRequest(f"'{constraint.param}' cannot be honoured beside 'tools'.", param=constraint.param)
        await compiled(constraint, compilations)
        schema = constraint.source
    written = await _refused_at("tools", compilations.taken(calling.grammar(schema, tokenizer.special_ids)))
    return Constraint("tools", "lark", written)


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
    return [Constraint(*field) for field in fields if field[-1] is not None]


async def _parsed(constraint: Constraint, compilations: Compilations) -> Constraint:
    """The constraint with a schema, which may be sent as text."""
    param, kind, source = constraint
    if kind != "json_schema" or not isinstance(source, str):
        return constraint
    return Constraint(param, kind, await compilations.off_loop(partial(parsed_json, source, param)))


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
