"""JSON schemas (draft 2020-12) in the words that the compiler of grammars knows: every answer to what comes out is
one to what came in. Objects hold the properties that are named and no others, unless the schema says more; what cannot
be said otherwise is left for the compiler to refuse, at its place."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

DEFINITIONS = ("$defs", "definitions")
"""What parts of a schema refer to."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that hold; others are remarks, as the draft has it."""

_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_INSIDE = frozenset(
    {"items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", *_UNEVALUATED}
)
_LISTED = frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"})
_MOST_CONTAINED = 64
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_VALUES = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose values are no schemas."""
_IN_DEFINITIONS = tuple(f"#/{name}/" for name in DEFINITIONS)
_PLACED = _LISTED - {"prefixItems"} | {"$ref", "$dynamicRef", "if", "then", "else", "not", "dependentSchemas"}
"""What may evaluate properties and items beside a schema's own."""


def restated(schema: Schema) -> Schema:
    """A schema of which each answer is one of this schema's."""
    return _told(schema, closes=not _composes(schema))


def with_definitions(schema: Schema) -> Schema:
    """The same schema as it can be a part of another one: what it refers to within itself stands in `$defs`."""
    taken = schema.get("$defs", {})
    free = (name for name in (f"part-{number}" for number in count()) if name not in taken)
    names: dict[str, str] = {}  # of definitions, by the references that they take the place of
    definitions: Schema = {}

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(moved, value))
        if not isinstance(value, dict):
            return value
        told = {key: inner if key in _VALUES else moved(inner) for key, inner in value.items()}
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and not reference.startswith(_IN_DEFINITIONS):
            target = _found(schema, reference)
            if target is not None:
                if reference not in names:
                    name = names[reference] = next(free)  # known before it is looked into: it may refer to itself
                    definitions[name] = moved(target)
                told["$ref"] = f"#/$defs/{names[reference]}"
        return told

    told: Schema = moved(schema)
    return {**told, "$defs": {**told.get("$defs", {}), **definitions}} if definitions else told


def _found(schema: Schema, reference: str) -> Any:
    """What a reference leads to, without definitions of its own; None: nothing."""
    found: Any = schema
    try:
        for part in unquote(reference).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
    except (LookupError, TypeError, ValueError):
        return None
    if reference[1:2] not in ("", "/"):
        return None
    return {key: value for key, value in schema.items() if key not in DEFINITIONS} if found is schema else found


def _told(schema: Schema, *, closes: bool) -> Schema:
    told = {key: _changed(key, value, partial(_told, closes=closes)) for key, value in schema.items()}
    for rule in _RULES:
        rule(told)
    if closes and "properties" in told and "patternProperties" not in told:
        told.setdefault("additionalProperties", False)
    return told


def _changed(key: str, value: Any, change: Callable[[Schema], Any]) -> Any:
    """A keyword's value, with what is a schema in it changed."""

    def each(inner: Any) -> Any:
        return change(inner) if isinstance(inner, dict) else inner

    if key in _LISTED and isinstance(value, list):
        return list(map(each, value))
    if key in _NAMED and isinstance(value, dict):
        return {name: each(inner) for name, inner in value.items()}
    return each(value) if key in _INSIDE else value


def _composes(schema: Schema) -> bool:
    """Whether several schemas speak of one object, so that none of them alone names its properties."""
    found = False

    def look(inner: Schema) -> None:
        nonlocal found
        several = "properties" in inner and _PLACED & inner.keys()
        exclusive = "oneOf" in inner and "discriminator" not in inner
        found = found or bool(several) or exclusive or len(inner.get("allOf", ())) > 1
        for key, value in inner.items():
            _changed(key, value, look)

    look(schema)
    return found


def _whole_counts(schema: Schema) -> None:
    for key in _COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def _remarks(schema: Schema) -> None:
    """Words that say nothing here."""
    if "if" not in schema or not {"then", "else"} & schema.keys():
        _drop(schema, "if", "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    if schema.get("uniqueItems") is False:
        _drop(schema, "uniqueItems")
    if schema.get("not") is False:
        _drop(schema, "not")
    for key in _UNEVALUATED:
        if schema.get(key) in (True, {}):
            _drop(schema, key)
    if "format" in schema and schema["format"] not in FORMATS:
        _drop(schema, "format")


def _unevaluated(schema: Schema) -> None:
    """Nothing else evaluates: they are the additional ones."""
    if _PLACED & schema.keys():
        return
    for key, plain in _UNEVALUATED.items():
        if key in schema and not (plain == "items" and "contains" in schema):
            schema.setdefault(plain, schema.pop(key))


def _contains(schema: Schema) -> None:
    """What an array shall contain stands at its beginning."""
    if "contains" not in schema or {"maxContains", "prefixItems", "unevaluatedItems"} & schema.keys():
        return
    count, wanted = schema.get("minContains", 1), schema["contains"]
    if count > _MOST_CONTAINED:
        return
    also = [schema["items"]] if "items" in schema else []
    schema["prefixItems"] = [{"allOf": [wanted, *also]} if also else wanted] * count
    schema["minItems"] = max(schema.get("minItems", 0), count)
    _drop(schema, "contains", "minContains")


def _dependent(schema: Schema) -> None:
    """A property is not there, or what depends on it holds."""
    needed: Mapping[str, list[str]] = schema.get("dependentRequired", {})
    conditions: dict[str, list[Any]] = {name: [{"required": names}] for name, names in needed.items() if names}
    for name, holds in schema.get("dependentSchemas", {}).items():
        conditions.setdefault(name, []).append(holds)
    choices = [
        {"anyOf": [{"properties": {name: False}}, condition]}
        for name, depending in conditions.items()
        for condition in depending
    ]
    if choices:
        schema["allOf"] = [*schema.get("allOf", []), *choices]
    _drop(schema, "dependentRequired", "dependentSchemas")


def _property_names(schema: Schema) -> None:
    """Names by a pattern, a length or a list, where properties have no schemas of their own."""
    names = schema.get("propertyNames")
    if names in (True, {}):
        _drop(schema, "propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties", "unevaluatedProperties"} & schema.keys():
        return
    value, rule = schema.get("additionalProperties", True), names.keys() - {"type", "title", "description"}
    if rule == {"enum"} or rule == {"const"}:
        listed = names["enum"] if "enum" in names else [names["const"]]
        schema["properties"] = {name: value for name in listed if isinstance(name, str)}
    elif rule == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: value}
    elif rule and rule <= {"minLength", "maxLength"}:
        schema["patternProperties"] = {f"^.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$": value}
    else:
        return
    schema["additionalProperties"] = False
    _drop(schema, "propertyNames")


def _other_types(schema: Schema) -> None:
    """Anything but a type is any other type."""
    refused = schema.get("not")
    if not isinstance(refused, dict) or refused.keys() != {"type"} or "type" in schema:
        return
    types = refused["type"] if isinstance(refused["type"], list) else [refused["type"]]
    if "integer" not in types or "number" in types:
        schema["type"] = sorted(_TYPES - set(types))
        _drop(schema, "not")


def _drop(schema: Schema, *keys: str) -> None:
    for key in keys:
        schema.pop(key, None)


_RULES: tuple[Callable[[Schema], None], ...] = (
    _whole_counts,
    _remarks,
    _property_names,
    _dependent,
    _unevaluated,
    _contains,
    _other_types,
)
