"""What a request wants its answer to be: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

import json
from typing import NamedTuple

from pydantic import JsonValue

from service.api.schemas import SamplingFields
from service.engine.grammar import Grammar
from service.errors import InvalidRequest
from service.grammars import GrammarError, GrammarKind
from service.runtime import Runtime

_ANY_OBJECT: JsonValue = {"type": "object"}


class Wish(NamedTuple):
    """One form that the answer shall have."""

    param: str
    kind: GrammarKind
    source: JsonValue


async def grammar_of(body: SamplingFields, runtime: Runtime) -> Grammar | None:
    """Raises InvalidRequest for more than one wish, and for one that cannot be honoured."""
    wishes = _wishes(body)
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
    ]
    for name, kind, older, value in more:
        asked = getattr(structured, "json_" if name == "json" else name, None)
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
