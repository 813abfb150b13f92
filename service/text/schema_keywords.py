"""Keywords of JSON schemas: their names, combinations of schemas, rules that rewrite one keyword by others, and
references, whose targets are moved to the definitions of a schema so that it can be a part of another one."""

import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from urllib.parse import unquote, urljoin

Schema = dict[str, Any]
Part = Any
"""Subschema: an object or a boolean."""

DEFINITIONS = ("$defs", "definitions")
"""Keywords that contain definitions."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that are enforced. Others are annotations, as in the draft."""
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_INSIDE = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
    | UNEVALUATED.keys()
)
LISTED = frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
"""For each limit: instance type, complementary limit, and its offset from the value."""
_COUNTS = frozenset({"minContains", "maxContains", *(name for name, opposite in OPPOSITES.items() if opposite[2])})
_PRECISION, _MAX_PRECISE = 1e-9, 1e6
_MAX_CONTAINED = 64


def with_definitions(schema: Schema) -> Schema:
    """Make a schema embeddable in another one: move the targets of all references to its definitions, and remove `$id`
    and anchors."""
    return _References(schema).gathered()


class _References:
    """Resolves references within a schema: pointers, anchors, and relative addresses."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._bases: dict[int, str] = {}  # base URI by id() of the subschema
        self._addressed: dict[str, Part] = {}
        self._dynamic: dict[str, list[Part]] = {}  # subschemas by dynamic anchor
        self._references = {
            id(part): f"#/{group}/{name}"
            for group in DEFINITIONS
            for name, part in (schema[group].items() if isinstance(schema.get(group), dict) else ())
            if re.fullmatch(r"[\w.-]+", name, re.ASCII)
        }
        self._wanted: list[Part] = []
        self._are_wanted: set[int] = set()  # id() of each subschema in `_wanted`
        taken = {*self._references.values()}
        self._free = (name for number in count() if (name := f"#/$defs/part-{number}") not in taken)
        self._look(schema, "")

    def gathered(self) -> Schema:
        """Return the schema with all targets moved to its definitions."""
        result, groups = self._moved(self._schema), dict[str, Schema]()
        for target in self._wanted:  # moving a definition may append to the list
            _, group, name = self._references[id(target)].split("/")
            groups.setdefault(group, {})[name] = self._moved(target) if isinstance(target, dict) else target
        return {**result, **groups}

    def _look(self, part: Schema, base: str) -> None:
        base = _joined(base, part["$id"]).rstrip("#") if isinstance(part.get("$id"), str) else base
        self._bases[id(part)] = base
        self._addressed.setdefault(base, part)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := part.get(key), str):
                self._addressed[f"{base}#{name}"] = part
                self._dynamic.setdefault(name, []).extend([part] * (key == "$dynamicAnchor"))
        for key, value in part.items():
            map_subschemas(key, value, lambda inner: self._look(inner, base))

    def _moved(self, part: Schema) -> Schema:
        addresses = {"$id", "$anchor", "$dynamicAnchor", *DEFINITIONS}
        result = {key: map_subschemas(key, value, self._moved) for key, value in part.items() if key not in addresses}
        if "json-schema.org/" in str(result.get("$schema")):
            del result["$schema"]  # would select an older draft, whose keywords we translate
        for key in ("$ref", "$dynamicRef"):
            if isinstance(result.get(key), str):
                address = _joined(self._bases[id(part)], result[key])
                target = self._found(address, is_dynamic=key == "$dynamicRef")
                result[key] = address if target is None else self._reference_to(target)
                if key == "$dynamicRef" and target is not None:
                    add_part(result, {"$ref": result.pop(key)})
        return result

    def _found(self, address: str, *, is_dynamic: bool) -> Part:
        """Resolve an address. Returns None if there is no target, or if it depends on the dynamic scope."""
        base, _, fragment = address.partition("#")
        found: Part = self._addressed.get(base)
        if fragment and not fragment.startswith("/"):
            found = self._addressed.get(address)
            parts = self._dynamic.get(fragment, [])
            if is_dynamic and any(found is part for part in parts):  # the outermost one applies
                outermost = [part for part in parts if self._bases[id(part)] == self._bases[id(self._schema)]]
                found = (outermost or parts)[0] if outermost or len(parts) == 1 else None
            return found
        try:
            for part in unquote(fragment).split("/")[1:]:
                name = part.replace("~1", "/").replace("~0", "~")
                found = found[int(name)] if isinstance(found, list) else found[name]
                base = self._bases.get(id(found), base)
        except (LookupError, TypeError, ValueError):
            return None
        if isinstance(found, dict) and id(found) not in self._bases:
            self._look(found, base)
        return found if isinstance(found, dict | bool) else None

    def _reference_to(self, target: Part) -> str:
        if id(target) not in self._references:
            self._references[id(target)] = next(self._free)
        if id(target) not in self._are_wanted:
            self._are_wanted.add(id(target))
            self._wanted.append(target)
        return self._references[id(target)]


def _joined(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return reference


def map_subschemas(key: str, value: Any, change: Callable[[Schema], Any]) -> Any:
    """Return the value of a keyword with `change` applied to its subschemas."""

    def each(inner: Any) -> Any:
        return change(inner) if isinstance(inner, dict) else inner

    if key in {*LISTED, "items"} and isinstance(value, list):
        return list(map(each, value))
    if key in _NAMED and isinstance(value, dict):
        return {name: each(inner) for name, inner in value.items()}
    return each(value) if key in _INSIDE else value


def add_part(schema: Schema, part: Part) -> None:
    """Add a schema that instances must satisfy as well, in place."""
    if isinstance(part, dict) and part.keys() <= {"anyOf", "type", "$ref"} - schema.keys():
        schema.update(part)
    elif part is not True:
        schema["allOf"] = [*schema.get("allOf", ()), part]


def any_of(parts: Sequence[Part]) -> Part:
    """Return the union of schemas, simplified."""
    return _joined_by("anyOf", parts, decisive=True)


def all_of(parts: Sequence[Part]) -> Part:
    """Return the intersection of schemas, simplified."""
    return _joined_by("allOf", parts, decisive=False)


def _joined_by(word: str, parts: Sequence[Part], *, decisive: bool) -> Part:
    kept = [part for part in (True if part == {} else part for part in parts) if part is not (not decisive)]
    if any(part is decisive for part in kept):
        return decisive
    return {word: kept} if len(kept) > 1 else kept[0] if kept else not decisive


def negation(part: Part) -> Part:
    """Return the complement of a schema, simplified."""
    return part is False if isinstance(part, bool) or part == {} else {"not": part}


def translate_older_drafts(schema: Schema) -> None:
    """Translate keywords of drafts 4 to 2019-09 to draft 2020-12, in place."""
    others = schema.pop("additionalItems", True)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"], schema["items"] = schema["items"], others
    for name, needed in schema.pop("dependencies", {}).items():
        key = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        schema[key] = {**schema.get(key, {}), name: needed}
    if "$recursiveRef" in schema:
        schema["$dynamicRef"] = schema.pop("$recursiveRef")


def round_counts(schema: Schema) -> None:
    """Convert whole floats in counting keywords to integers, in place."""
    for key in _COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def round_exclusive_limits(schema: Schema) -> None:
    """Work around llguidance 1.9, which admits an excluded whole number if the other limit is closer than 1."""
    for key, limit, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value = schema.get(key, False)
        if not isinstance(value, bool) and float(value).is_integer() and abs(value) < _MAX_PRECISE:
            bounds = [schema[limit]] if limit in schema else []
            schema[limit] = max([*bounds, schema.pop(key) + sign * _PRECISION], key=lambda bound: sign * bound)


def drop_annotations(schema: Schema) -> None:
    """Remove keywords without effect on validation."""
    if "if" not in schema or not {"then", "else"} & schema.keys():
        _drop(schema, "if", "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    if schema.get("uniqueItems") is False:
        _drop(schema, "uniqueItems")
    for key in UNEVALUATED:
        if schema.get(key) in (True, {}):
            _drop(schema, key)
    if "format" in schema and schema["format"] not in FORMATS:
        _drop(schema, "format")


def expand_property_names(schema: Schema) -> None:
    """Rewrite `propertyNames` as `properties` or `patternProperties`, if the schema has neither."""
    names = schema.get("propertyNames")
    if names is True or (isinstance(names, dict) and names.items() <= {"type": "string"}.items()):  # always true
        _drop(schema, "propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
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


def expand_contains(schema: Schema) -> None:
    """Rewrite `contains` as consecutive items at the start, or after some of `prefixItems`."""
    if "contains" not in schema:
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    row = least if most is None else most
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if max(row, least, len(first)) > _MAX_CONTAINED or row < least:
        return
    wanted, beyond = schema["contains"], True if most is None else negation(schema["contains"])
    _drop(schema, "contains", "minContains", "maxContains", "prefixItems", "items")
    ways = []
    for start in range(len(first) + 1 if least else 1):
        placed = [beyond] * start + [wanted] * least + [True] * (row - least)
        placed += [beyond] * (len(first) - len(placed))
        own = [*first, *[rest] * (len(placed) - len(first))]
        items = [all_of(both) for both in zip(placed, own, strict=True)]
        ways.append({"prefixItems": items, "items": all_of([rest, beyond]), "minItems": start + least if least else 0})
    ways[0]["minItems"] = max(ways[0]["minItems"], schema.get("minItems", 0))
    if len(ways) == 1:
        schema.update(ways[0])
    else:
        add_part(schema, {"anyOf": ways})


def _drop(schema: Schema, *keys: str) -> None:
    for key in keys:
        schema.pop(key, None)
