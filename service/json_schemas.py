"""JSON schemas (draft 2020-12) in the words that the compiler of grammars knows: every answer to what comes out is
one to what came in. Objects hold the properties that are named and no others, unless the schema says more; what cannot
be said otherwise is left for the compiler to refuse, at its place."""

import re
from collections.abc import Callable, Sequence
from itertools import combinations, count, pairwise
from typing import Any
from urllib.parse import unquote, urljoin

Schema = dict[str, Any]
Part = Any
"""A schema inside another one: an object or a boolean."""

DEFINITIONS = ("$defs", "definitions")
"""What parts of a schema refer to."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Those that hold; others are remarks, as the draft has it."""

_UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
_INSIDE = frozenset(
    {"items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"}
    | _UNEVALUATED.keys()
)
_LISTED = frozenset({"prefixItems", "allOf", "anyOf", "oneOf"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_OPPOSITES = {
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
"""The type that each limit is for, the limit that says its opposite, and what is added to its number."""
_COUNTS = frozenset({"minContains", "maxContains", *(name for name, opposite in _OPPOSITES.items() if opposite[2])})
_WITHOUT_OPPOSITE = frozenset(
    {"multipleOf", "pattern", "format", "uniqueItems", "propertyNames", "patternProperties", *_UNEVALUATED}
    | {"$dynamicRef", "$recursiveRef", "dependencies", "additionalItems"}
)
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_PLACED = _LISTED - {"prefixItems"} | {"$ref", "if", "then", "else", "not", "dependentSchemas"}
"""What may evaluate properties and items beside a schema's own."""

_EXACT = 2**53  # numbers up to it are told apart
_PRECISION, _MOST_PRECISE = 1e-9, 1e6
_MOST_CONTAINED = 64
_MOST_WAYS = 64
_MOST_TURNED = 1_000  # parts that are negated or said twice
_MOST_COMPARED = 100_000  # pairs of parts
_DEEPEST = 8  # parts inside parts that are looked into


def restated(schema: Schema) -> Schema:
    """A schema of which each answer is one of this schema's. Raises OverflowError where it would be too large."""
    whole = with_definitions(schema)
    definitions = {f"#/{group}/{name}": part for group in DEFINITIONS for name, part in whole.pop(group, {}).items()}
    return _Restating(definitions, closes=not any(map(_composes, [whole, *definitions.values()]))).whole(whole)


def with_definitions(schema: Schema) -> Schema:
    """The same schema as it can be a part of another one: all that it refers to within itself stands in its
    definitions, and nothing in it has an address of its own."""
    return _Gathering(schema).gathered()


class _Gathering:
    """What a schema refers to, by whichever of its addresses."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._bases: dict[int, str] = {}  # what references in a part are relative to, by its identity
        self._addressed: dict[str, Part] = {}
        self._dynamic: dict[str, list[Part]] = {}  # parts that have a dynamic anchor, by its name
        self._references = {
            id(part): f"#/{group}/{name}"
            for group in DEFINITIONS
            for name, part in (schema[group].items() if isinstance(schema.get(group), dict) else ())
            if re.fullmatch(r"[\w.-]+", name, re.ASCII)
        }
        self._wanted: list[Part] = []
        self._look(schema, "")

    def gathered(self) -> Schema:
        told, groups = self._moved(self._schema), dict[str, Schema]()
        for target in self._wanted:  # which grows meanwhile
            _, group, name = self._references[id(target)].split("/")
            groups.setdefault(group, {})[name] = self._moved(target) if isinstance(target, dict) else target
        return {**told, **groups}

    def _look(self, part: Schema, base: str) -> None:
        base = _joined(base, part["$id"]).rstrip("#") if isinstance(part.get("$id"), str) else base
        self._bases[id(part)] = base
        self._addressed.setdefault(base, part)
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := part.get(key), str):
                self._addressed[f"{base}#{name}"] = part
                self._dynamic.setdefault(name, []).extend([part] * (key == "$dynamicAnchor"))
        for key, value in part.items():
            _changed(key, value, lambda inner: self._look(inner, base))

    def _moved(self, part: Schema) -> Schema:
        addresses = {"$id", "$anchor", "$dynamicAnchor", *DEFINITIONS}
        told = {key: _changed(key, value, self._moved) for key, value in part.items() if key not in addresses}
        if "json-schema.org/" in str(told.get("$schema")):
            del told["$schema"]  # words of older drafts are told in those of this one
        for key in ("$ref", "$dynamicRef"):
            if isinstance(told.get(key), str):
                address = _joined(self._bases[id(part)], told[key])
                target = self._found(address, is_dynamic=key == "$dynamicRef")
                told[key] = address if target is None else self._reference_to(target)
                if key == "$dynamicRef" and target is not None:
                    _also(told, {"$ref": told.pop(key)})
        return told

    def _found(self, address: str, *, is_dynamic: bool) -> Part:
        """What is at an address; None: nothing, or what depends on the way there."""
        base, _, fragment = address.partition("#")
        found: Part = self._addressed.get(base)
        if fragment and not fragment.startswith("/"):
            found = self._addressed.get(address)
            parts = self._dynamic.get(fragment, [])
            if is_dynamic and any(found is part for part in parts):  # the outermost one on the way there
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
            free = (f"#/$defs/part-{number}" for number in count())
            self._references[id(target)] = next(name for name in free if name not in self._references.values())
        if not any(target is one for one in self._wanted):
            self._wanted.append(target)
        return self._references[id(target)]


class _Restating:
    """Says parts of a schema otherwise. Each rule writes what means the same, or less, in words of the draft; then the
    schemas inside are told."""

    def __init__(self, definitions: dict[str, Part], *, closes: bool) -> None:
        """`definitions`: by the references that lead to them."""
        self._definitions = definitions
        self._closes = closes
        self._wanted: list[str] = []
        self._turned = 0
        self._compared = 0

    def whole(self, schema: Schema) -> Schema:
        told = self._told(schema)
        for reference in self._wanted:  # which grows meanwhile
            part, (_, group, name) = self._definitions[reference], reference.split("/")
            told.setdefault(group, {})[name] = self._told(part) if isinstance(part, dict) else part
        return told

    def _told(self, schema: Schema) -> Schema:
        told = dict(schema)
        for rule in (_older_words, _whole_counts, _exclusive_limits, _remarks, self._unevaluated, _property_names):
            rule(told)
        self._alternatives(told)
        if "not" in told and (opposite := self._negated(told["not"])) is not None:
            del told["not"]
            _also(told, opposite)
        _contains(told)
        told = {key: _changed(key, value, self._told) for key, value in told.items()}
        if (reference := told.get("$ref")) in self._definitions and reference not in self._wanted:
            self._wanted.append(reference)
        if self._closes and "properties" in told and "patternProperties" not in told:
            told.setdefault("additionalProperties", False)
        return told

    def _unevaluated(self, schema: Schema) -> None:
        """A schema for each way in which its parts can hold: what they evaluate is known there."""
        if _UNEVALUATED.keys() & schema.keys():
            ways = self._ways(schema, _DEEPEST)
            schema.clear()
            _also(schema, _any_of([_all_of(way) for way in ways]))

    def _ways(self, schema: Part, depth: int) -> list[list[Part]]:
        """Lists of parts that see no properties and items but their own; where all of a list hold, the schema does."""
        if not isinstance(schema, dict):
            return [[schema]]
        told = dict(schema)
        _older_words(told)
        self._alternatives(told, evaluating=True)
        choices = [self._ways(part, depth - 1) for part in told.pop("allOf", ()) if depth]
        if told.get("$ref") in self._definitions and depth:
            choices.append(self._ways(self._definitions[told.pop("$ref")], depth - 1))
        if "anyOf" in told and depth:
            choices.append([way for option in told.pop("anyOf") for way in self._ways(option, depth - 1)])
        others = {plain: told.pop(key) for key, plain in _UNEVALUATED.items() if key in told}
        ways = [[told]]
        for choice in choices:
            if len(ways) * len(choice) > _MOST_WAYS:
                raise OverflowError("what is unevaluated depends on too many choices")
            ways = [[*way, *chosen] for way in ways for chosen in choice]
        return [_closed(way, others) for way in ways]

    def _alternatives(self, schema: Schema, *, evaluating: bool = False) -> None:
        """Conditions and choices of one as choices of any. `evaluating`: a choice holds only where it is looked at."""
        if "if" in schema and {"then", "else"} & schema.keys():
            self._count()
            condition, then, otherwise = (schema.pop(key, True) for key in ("if", "then", "else"))
            _also(schema, _any_of([_all_of([condition, then]), _all_of([_not(condition), otherwise])]))
        for key in ("dependentRequired", "dependentSchemas"):
            for name, needed in schema.pop(key, {}).items():
                part = {"required": needed} if key == "dependentRequired" else needed
                is_there = _object(required=[name])
                _also(schema, _any_of([_not(is_there), _all_of([part, is_there] if evaluating else [part])]))
        if "oneOf" in schema:
            options, common = list(enumerate(schema.pop("oneOf"))), dict(schema)
            pairs = () if _are_discriminated([option for _, option in options]) else combinations(options, 2)
            met = {
                frozenset({first, second})
                for (first, one), (second, other) in pairs
                if not self._is_disjoint({"allOf": [common, one]}, other, _DEEPEST)
            }
            others = [[_not(other) for second, other in options if {first, second} in met] for first, _ in options]
            _also(
                schema, _any_of([_all_of([one, *excluded]) for (_, one), excluded in zip(options, others, strict=True)])
            )

    def _negated(self, schema: Part) -> Part:
        """What none of the schema's values is, as far as words for it are known; None: it cannot be said. What is
        negated inside is told later."""
        if isinstance(schema, bool):
            return not schema
        self._count()
        told = dict(schema)
        _whole_counts(told)
        _remarks(told)
        self._alternatives(told)
        opposites = [self._opposites(key, value, told) for key, value in told.items()]
        return None if None in opposites else _any_of([part for parts in opposites for part in parts or ()])

    def _opposites(self, key: str, value: Any, beside: Schema) -> list[Part] | None:
        """What breaks a keyword, in one way or another; None: that cannot be said."""
        if key in _WITHOUT_OPPOSITE or (key == "$ref" and value not in self._definitions):
            return None
        if key in _OPPOSITES:
            kind, limit, more = _OPPOSITES[key]
            is_known = not isinstance(value, bool) and abs(value) <= _EXACT
            return (
                ([{"type": kind, limit: value + more}] if value + more >= 0 or not more else []) if is_known else None
            )
        match key:
            case "not":
                return [value]
            case "$ref":
                return [_not(self._definitions[value])]
            case "allOf":
                return list(map(_not, value))
            case "anyOf":
                return [_all_of(list(map(_not, value)))]
            case "type":
                types = _types(value)  # numbers with a fraction, which are no integers, have no word of their own
                return ([{"type": sorted(_TYPES - types)}] if types < _TYPES else []) if types <= _TYPES else None
            case "const" | "enum":
                return _other_values(value if key == "enum" else [value])
            case "required":
                return [_object(properties={name: False}, additionalProperties=True) for name in value]
            case "properties":
                named = {name: _not(part) for name, part in value.items()}
                return [_object(required=[n], properties={n: p}, additionalProperties=True) for n, p in named.items()]
            case "additionalProperties":  # all of them break it, and none is named
                named = {key: dict.fromkeys(beside.get(key, ()), False) for key in ("properties", "patternProperties")}
                return [_object(minProperties=1, additionalProperties=_not(value), **named)]
            case "prefixItems":
                return [_item_at(place, _not(part)) for place, part in enumerate(value)]
            case "items":
                place = len(beside.get("prefixItems", ()))
                return None if isinstance(value, list) else [_item_at(place, _not(value))]
            case "contains":
                least, most = beside.get("minContains", 1), beside.get("maxContains")
                counts = [{"minContains": 0, "maxContains": least - 1}] if least > 0 else []
                counts += [{"minContains": most + 1}] if most is not None else []
                return [{"type": "array", key: value, **numbers} for numbers in counts]
        return []

    def _is_disjoint(self, one: Part, other: Part, depth: int) -> bool:
        """Whether it is plain that no value is of both schemas: by types, by values, or by those of a property."""
        self._compared += 1
        if depth < 0 or self._compared > _MOST_COMPARED:
            return False
        sides = self._facts(one, set()), self._facts(other, set())
        kinds = frozenset.intersection(_TYPES, *(_kinds(fact) for facts in sides for fact in facts))
        values = [[set(map(_known, given)) for fact in facts if (given := _given(fact))] for facts in sides]
        if not kinds or any(one.isdisjoint(other) for one in values[0] for other in values[1]):
            return True
        for facts, beside in ((sides[0], other), (sides[1], one)):
            choices = [fact[key] for fact in facts for key in ("anyOf", "oneOf") if key in fact]
            if any(all(self._is_disjoint(option, beside, depth - 1) for option in options) for options in choices):
                return True
        for name in dict.fromkeys(name for facts in sides for fact in facts for name in fact.get("required", ())):
            first, second = ({"allOf": [_property(fact, name) for fact in facts]} for facts in sides)
            if kinds == {"object"} and self._is_disjoint(first, second, depth - 1):
                return True
        return False

    def _facts(self, schema: Part, followed: set[str]) -> list[Schema]:
        """Schemas of all of its values: itself, what it refers to, and what all hold."""
        if not isinstance(schema, dict):
            return [] if schema else [{"enum": []}]
        parts = list(schema.get("allOf", ()))
        if (reference := schema.get("$ref")) in self._definitions and reference not in followed:
            followed.add(reference)
            parts.append(self._definitions[reference])
        return [schema, *(fact for part in parts for fact in self._facts(part, followed))]

    def _count(self) -> None:
        self._turned += 1
        if self._turned > _MOST_TURNED:
            raise OverflowError("this schema becomes too large where parts of it are negated")


def _are_discriminated(options: Sequence[Part]) -> bool:
    """Whether a property that all options require tells them apart, as in unions with a `kind` or `type`."""
    if not options or not all(isinstance(option, dict) and option.get("type") == "object" for option in options):
        return False
    for name in options[0].get("required", ()):
        said = [option.get("properties", {}).get(name) for option in options if name in option.get("required", ())]
        words = [part["const"] for part in said if isinstance(part, dict) and isinstance(part.get("const"), str)]
        if len(set(words)) == len(options):
            return True
    return False


def _any_of(parts: Sequence[Part]) -> Part:
    return _joined_by("anyOf", parts, decisive=True)


def _all_of(parts: Sequence[Part]) -> Part:
    return _joined_by("allOf", parts, decisive=False)


def _joined_by(word: str, parts: Sequence[Part], *, decisive: bool) -> Part:
    told = [part for part in (True if part == {} else part for part in parts) if part is not (not decisive)]
    if any(part is decisive for part in told):
        return decisive
    return {word: told} if len(told) > 1 else told[0] if told else not decisive


def _not(part: Part) -> Part:
    return part is False if isinstance(part, bool) or part == {} else {"not": part}


def _also(schema: Schema, part: Part) -> None:
    """Make a schema hold another one, too."""
    if isinstance(part, dict) and part.keys() <= {"anyOf", "type", "$ref"} - schema.keys():
        schema.update(part)
    elif part is not True:
        schema["allOf"] = [*schema.get("allOf", ()), part]


def _closed(way: list[Part], others: Schema) -> list[Part]:
    """With what properties and items must be that no part evaluates."""
    parts = [part for part in way if isinstance(part, dict)]
    for plain, other in others.items():
        told: Schema = {plain: other}
        if plain == "items":
            told[plain] = _any_of([other, *(part["contains"] for part in parts if "contains" in part)])
            told["prefixItems"] = [True] * max(len(part.get("prefixItems", ())) for part in parts)
        else:
            for key in ("properties", "patternProperties"):
                told[key] = {name: True for part in parts for name in part.get(key, ())}
        if not any(plain in part for part in parts):
            way = [*way, told] if len(way) > 1 else [{**told, **way[0]}]
    return way


def _object(**words: Any) -> Schema:
    return {"type": "object", **words}


def _item_at(place: int, part: Part) -> Schema:
    return {"type": "array", "minItems": place + 1, "prefixItems": [*[True] * place, part]}


def _other_values(values: list[Any]) -> list[Part] | None:
    """Lists and objects are left out where one of them is among the values."""
    kinds = set(map(_kind, values))
    told: list[Part] = [{"type": sorted(_TYPES - kinds)}] if kinds < _TYPES else []
    if "boolean" in kinds:
        told += [{"const": flag} for flag in (False, True) if not any(value is flag for value in values)]
    if numbers := sorted({value for value in values if _kind(value) == "number"}):
        if max(map(abs, numbers)) > _EXACT:
            return None
        told.append({"type": "number", "exclusiveMaximum": numbers[0]})
        told += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(numbers)]
        told.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if words := {value for value in values if isinstance(value, str)}:
        told.append({"type": "string", "pattern": _other_words(words)})
    return told


def _other_words(words: set[str]) -> str:
    """An expression for all strings but these: they leave what the words begin with, or end in it."""
    following: dict[str, set[str]] = {word: set() for word in words}
    for word in words:
        for place, letter in enumerate(word):
            following.setdefault(word[:place], set()).add(letter)
    ways = []
    for begun, letters in sorted(following.items()):
        begins, but = _written(begun), _written("".join(sorted(letters)))
        ways.append(f"{begins}[^{but}](?s:.)*" if but else f"{begins}(?s:.)+")
        ways += [] if begun in words else [begins]
    return f"^(?:{'|'.join(ways)})$"


def _written(text: str) -> str:
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)


def _property(schema: Schema, name: str) -> Part:
    other = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return schema.get("properties", {}).get(name, other)


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "object")


def _known(value: Any) -> tuple[str, Any]:
    """The same for the same values; lists are not told apart, nor objects."""
    return _kind(value), None if isinstance(value, list | dict) else value


def _types(value: Any) -> frozenset[str]:
    listed = value if isinstance(value, list) else [value]
    return frozenset("number" if kind == "integer" else kind for kind in listed)


def _kinds(schema: Schema) -> frozenset[str]:
    types, given = _types(schema.get("type", list(_TYPES))), _given(schema)
    return types if given is None else types & set(map(_kind, given))


def _given(schema: Schema) -> list[Any] | None:
    """The values that a schema lists."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _joined(base: str, reference: str) -> str:
    try:
        return base + reference if reference.startswith("#") else urljoin(base, reference)
    except ValueError:
        return reference


def _changed(key: str, value: Any, change: Callable[[Schema], Any]) -> Any:
    """A keyword's value, with what is a schema in it changed."""

    def each(inner: Any) -> Any:
        return change(inner) if isinstance(inner, dict) else inner

    if key in {*_LISTED, "items"} and isinstance(value, list):
        return list(map(each, value))
    if key in _NAMED and isinstance(value, dict):
        return {name: each(inner) for name, inner in value.items()}
    return each(value) if key in _INSIDE else value


def _composes(schema: Part) -> bool:
    """Whether several schemas speak of one object, so that none of them alone names its properties."""
    found = False

    def look(inner: Schema) -> None:
        nonlocal found
        several = {"properties", *_UNEVALUATED} & inner.keys() and _PLACED & inner.keys()
        exclusive = "oneOf" in inner and "discriminator" not in inner
        conditional = "dependentSchemas" in inner or ("if" in inner and {"then", "else"} & inner.keys())
        found = found or bool(several or exclusive or conditional) or len(inner.get("allOf", ())) > 1
        for key, value in inner.items():
            _changed(key, value, look)

    if isinstance(schema, dict):
        look(schema)
    return found


def _older_words(schema: Schema) -> None:
    """Words of drafts 4 to 2019-09 in those of this one."""
    others = schema.pop("additionalItems", True)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"], schema["items"] = schema["items"], others
    for name, needed in schema.pop("dependencies", {}).items():
        key = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        schema[key] = {**schema.get(key, {}), name: needed}
    if "$recursiveRef" in schema:
        schema["$dynamicRef"] = schema.pop("$recursiveRef")


def _whole_counts(schema: Schema) -> None:
    for key in _COUNTS & schema.keys():
        if isinstance(schema[key], float) and schema[key].is_integer():
            schema[key] = int(schema[key])


def _exclusive_limits(schema: Schema) -> None:
    """llguidance 1.9 allows a whole number that a limit excludes, where the other limit is less than one away."""
    for key, limit, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        value = schema.get(key, False)
        if not isinstance(value, bool) and float(value).is_integer() and abs(value) < _MOST_PRECISE:
            bounds = [schema[limit]] if limit in schema else []
            schema[limit] = max([*bounds, schema.pop(key) + sign * _PRECISION], key=lambda bound: sign * bound)


def _remarks(schema: Schema) -> None:
    """Words that say nothing here."""
    if "if" not in schema or not {"then", "else"} & schema.keys():
        _drop(schema, "if", "then", "else")
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        _drop(schema, "contains", "minContains", "maxContains")
    if schema.get("uniqueItems") is False:
        _drop(schema, "uniqueItems")
    for key in _UNEVALUATED:
        if schema.get(key) in (True, {}):
            _drop(schema, key)
    if "format" in schema and schema["format"] not in FORMATS:
        _drop(schema, "format")


def _property_names(schema: Schema) -> None:
    """Names by a pattern, a length or a list, where properties have no schemas of their own."""
    names = schema.get("propertyNames")
    if names is True or (isinstance(names, dict) and names.items() <= {"type": "string"}.items()):  # as all names are
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


def _contains(schema: Schema) -> None:
    """What a list shall contain stands in a row, at its beginning or behind some of the first items."""
    if "contains" not in schema:
        return
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    row = least if most is None else most
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if max(row, least, len(first)) > _MOST_CONTAINED or row < least:
        return
    wanted, beyond = schema["contains"], True if most is None else _not(schema["contains"])
    _drop(schema, "contains", "minContains", "maxContains", "prefixItems", "items")
    ways = []
    for start in range(len(first) + 1 if least else 1):
        placed = [beyond] * start + [wanted] * least + [True] * (row - least)
        placed += [beyond] * (len(first) - len(placed))
        own = [*first, *[rest] * (len(placed) - len(first))]
        items = [_all_of(both) for both in zip(placed, own, strict=True)]
        ways.append({"prefixItems": items, "items": _all_of([rest, beyond]), "minItems": start + least if least else 0})
    ways[0]["minItems"] = max(ways[0]["minItems"], schema.get("minItems", 0))
    if len(ways) == 1:
        schema.update(ways[0])
    else:
        _also(schema, {"anyOf": ways})


def _drop(schema: Schema, *keys: str) -> None:
    for key in keys:
        schema.pop(key, None)
