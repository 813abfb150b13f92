"""Constraints of a request on its answer: OpenAI's `response_format` and `tools`, vLLM's `structured_outputs` and
`guided_*`, and `json_schema`, `regex`, `ebnf` and `grammar` of SGLang and llama.cpp."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pydantic import JsonValue

from service.api.schemas import (
    ChatCompletionRequest,
    CompletionFields,
    Function,
    ResponseFormat,
    StructuredOutputs,
    ToolChoice,
)
from service.errors import InvalidRequest, parsed_json
from service.text.answers import BEGIN, END, Calling, Thinking
from service.text.chat_template import HERMES
from service.text.grammars import (
    Grammar,
    GrammarBudgetError,
    GrammarCompiler,
    GrammarError,
    GrammarKind,
    Steps,
    as_lark,
)
from service.text.tokenizer import ChatTokenizer

_ANY_OBJECT: JsonValue = {"type": "object"}
_NO_ARGUMENTS: dict[str, JsonValue] = {"type": "object", "properties": {}, "additionalProperties": False}
_STRUCTURED = {name: name.rstrip("_") for name in ("json_", "json_object", "regex", "choice", "grammar")}


class Constraint(NamedTuple):
    """Constraint on the answer's text, with the request field that sets it."""

    param: str
    kind: GrammarKind
    source: Any  # schema, regular expression, list of choices, or grammar


class AnswerForm(NamedTuple):
    """Parts of an answer: reasoning, function calls, text and its constraint. A part that is absent is None."""

    calling: Calling | None
    functions: Sequence[Function]  # all functions of the request; all their schemas are checked
    chosen: str | None  # name of the only function that the answer may call
    constraint: Constraint | None
    described: Mapping[str, str]  # Lark grammars by path, checked but not enforced
    thinking: Thinking | None = None

    @property
    def is_free(self) -> bool:
        """Whether the answer needs no grammar."""
        return self.calling is None and self.constraint is None and not self.described

    @property
    def tags(self) -> list[str]:
        """Strings that mark the parts of an answer."""
        calls = [] if self.calling is None else [self.calling.form.trigger]
        return calls if self.thinking is None else [*calls, BEGIN, END]


def form_of_answer(body: CompletionFields, tokenizer: ChatTokenizer, described: Mapping[str, str]) -> AnswerForm:
    """Return the form of an answer as the request describes it, without reasoning. Raises InvalidRequest for
    conflicting constraints."""
    functions, chosen, calling = list[Function](), None, None
    if isinstance(body, ChatCompletionRequest):
        functions, chosen = _functions(body), _chosen(body)
        calling = _calling(body, tokenizer) if functions else None
    constraints = list(_constraints(body))
    for constraint in constraints if calling is not None else ():
        if constraint.kind != "json_schema" or not isinstance(constraint.source, dict):
            raise InvalidRequest(f"'{constraint.param}' cannot be combined with 'tools'.", param=constraint.param)
    if len(constraints) > 1:
        names = " and ".join(f"'{constraint.param}'" for constraint in constraints)
        raise InvalidRequest(f"Only one of {names} can be used.", param=constraints[1].param)
    for name, given in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if given and (constraints or calling is not None):
            param = "tools" if calling is not None else constraints[0].param
            raise InvalidRequest(f"'{name}' cannot be combined with '{param}'.", param=name)
    return AnswerForm(calling, functions, chosen, constraints[0] if constraints else None, described)


def compiled(
    form: AnswerForm, compiler: GrammarCompiler, special_ids: Mapping[str, int]
) -> Steps[tuple[Grammar | None, tuple[str, ...]]]:
    """Compile the grammar of an answer in steps. Returns the grammar, or None if the answer is unconstrained, and the
    paths of constraints that it does not enforce. `special_ids`: ids of special tokens by name. Raises InvalidRequest
    naming the field and the path in its schema."""
    for path, definition in form.described.items():
        with _named_errors(path):
            yield from compiler.compiling("lark", definition)
    schemas, relaxed = dict[str, dict[str, Any]](), list[str]()
    for position, function in enumerate(form.functions):
        param, schema = f"tools.{position}.function.parameters", function.parameters or _NO_ARGUMENTS
        with _named_errors(param):
            schemas[function.name], dropped = yield from compiler.fitting(schema, strict=function.strict is True)
        relaxed += [".".join((param, *path)) for path in dropped]
    grammar, last = None, form.constraint
    if last is not None:
        with _named_errors(last.param):
            grammar = yield from compiler.compiling(last.kind, last.source)
    if form.calling is not None:
        callable_ = schemas if form.chosen is None else {form.chosen: schemas[form.chosen]}
        with _named_errors("tools"):
            answer = None if last is None else last.source
            last = Constraint("tools", "lark", (yield from form.calling.grammar(callable_, answer, special_ids)))
            grammar = yield from compiler.compiling(last.kind, last.source)
    if last is not None and form.thinking is not None:
        with _named_errors(last.param):
            written = form.thinking.grammar(as_lark(last.kind, last.source), special_ids)
            grammar = yield from compiler.compiling("lark", written)
    return grammar, tuple(relaxed)


@contextmanager
def _named_errors(param: str) -> Iterator[None]:
    """Turn grammar errors of the block into InvalidRequest naming the path in the field `param`."""
    try:
        yield
    except (GrammarError, GrammarBudgetError) as error:
        path = ".".join((param, *error.path))
        raise InvalidRequest(f"Invalid value for '{path}': {error}.", param=path) from error


def _functions(body: ChatCompletionRequest) -> list[Function]:
    """Return the functions that the answer may call. Raises InvalidRequest for duplicate names, and for `tool_choice`
    without `tools`."""
    if body.tools is None and body.tool_choice not in (None, "none"):
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")
    functions = [tool.function for tool in body.callable_tools]
    names = [function.name for function in functions]
    for position, name in enumerate(names):
        if name in names[:position]:
            param = f"tools.{position}.function.name"
            raise InvalidRequest(f"Invalid value for '{param}': the name {name!r} is used twice.", param=param)
    return functions


def _chosen(body: ChatCompletionRequest) -> str | None:
    """Return the name of the function in `tool_choice`, or None. Raises InvalidRequest if `tools` lacks the
    function."""
    if not isinstance(body.tool_choice, ToolChoice):
        return None
    name = body.tool_choice.function.name
    if all(tool.function.name != name for tool in body.tools or ()):
        raise InvalidRequest(f"Invalid value for 'tool_choice': 'tools' has no function {name!r}.", param="tool_choice")
    return name


def _calling(body: ChatCompletionRequest, tokenizer: ChatTokenizer) -> Calling:
    """Return the call syntax and rules for the answer."""
    traits, choice = tokenizer.traits(with_tools=True), body.tool_choice
    parallel = traits.calls != "one" if body.parallel_tool_calls is None else body.parallel_tool_calls
    return Calling(
        traits.form or HERMES,
        must=choice not in (None, "auto"),
        parallel=parallel and not isinstance(choice, ToolChoice),
        short_ids=traits.short_ids,
    )


def _constraints(body: CompletionFields) -> Iterator[Constraint]:
    """Yield all constraints that a request sets, by any field. Raises InvalidRequest for a schema that is not valid
    JSON."""
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
    for param, kind, source in fields:
        if source is not None:
            is_text = kind == "json_schema" and isinstance(source, str)
            yield Constraint(param, kind, parsed_json(source, param) if is_text else source)


def _of_format(form: ResponseFormat | None) -> Iterator[tuple[str, GrammarKind, JsonValue]]:
    """Yield the constraints of `response_format`."""
    if form is None:
        return
    named = None if form.json_schema is None else form.json_schema.schema_ or _ANY_OBJECT
    given: dict[str, JsonValue] = {"response_format.json_schema.schema": named, "response_format.schema": form.schema_}
    schemas: dict[str, JsonValue] = {param: schema for param, schema in given.items() if schema is not None}
    if form.type == "text":
        for param in schemas:
            raise InvalidRequest(f"'{param}' cannot be combined with the type 'text'.", param=param)
        return
    if form.type == "json_schema" and not schemas:
        param = "response_format.json_schema"
        raise InvalidRequest(f"Missing required parameter: '{param}'.", param=param)
    for param, schema in schemas.items():
        yield param, "json_schema", schema
    if not schemas:
        yield "response_format", "json_schema", _ANY_OBJECT
