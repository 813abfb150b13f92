"""Translate JSON schemas (draft 2020-12) into the keywords that llguidance supports: every instance of the result is
also an instance of the original schema. Objects have the named properties and no others, unless the schema allows more.
Keywords that cannot be expressed are kept, and the compiler refuses them with their path."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

from service.text.schema_keywords import (
    DEFINITIONS,
    LISTED,
    OPPOSITES,
    UNEVALUATED,
    Part,
    Schema,
    add_part,
    all_of,
    any_of,
    drop_annotations,
    expand_contains,
    expand_property_names,
    map_subschemas,
    negation,
    round_counts,
    round_exclusive_limits,
    translate_older_drafts,
    with_definitions,
)

_WITHOUT_OPPOSITE = frozenset(
    {"multipleOf", "pattern", "format", "uniqueItems", "propertyNames", "patternProperties", *UNEVALUATED}
    | {"$dynamicRef", "$recursiveRef", "dependencies", "additionalItems"}
)
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
_PLACED = LISTED - {"prefixItems"} | {"$ref", "if", "then", "else", "not", "dependentSchemas"}
"""Keywords whose subschemas may evaluate properties and items of the same instance."""

_EXACT = 2**53  # largest magnitude of integers that floats represent exactly
_MAX_WAYS = 64
_MAX_NEGATED = 1_000  # limit on subschemas that are negated or duplicated
_MAX_COMPARED = 100_000  # limit on compared pairs of subschemas
_MAX_DEPTH = 8  # nesting depth that is examined


def translated(schema: Schema) -> Schema:
    """Translate a schema. Raises OverflowError if the result would be too large."""
    whole = with_definitions(schema)
    definitions = {f"#/{group}/{name}": part for group in DEFINITIONS for name, part in whole.pop(group, {}).items()}
    return _Translation(definitions, closes=not any(map(_composes, [whole, *definitions.values()]))).whole(whole)


class _Translation:
    """Rewrites a schema by rules, then its subschemas. Each rule yields an equivalent or a narrower schema."""

    def __init__(self, definitions: dict[str, Part], *, closes: bool) -> None:
        """`definitions`: subschemas by reference; `closes`: objects may not have unnamed properties."""
        self._definitions = definitions
        self._closes = closes
        self._wanted: list[str] = []
        self._are_wanted: set[str] = set()
        self._negated_count = 0
        self._compared = 0

    def whole(self, schema: Schema) -> Schema:
        """Translate a schema and the definitions it uses."""
        result = self._translated(schema)
        for reference in self._wanted:  # translating a definition may append to the list
            part, (_, group, name) = self._definitions[reference], reference.split("/")
            result.setdefault(group, {})[name] = self._translated(part) if isinstance(part, dict) else part
        return result

    def _translated(self, schema: Schema) -> Schema:
        result = dict(schema)
        for rule in (
            translate_older_drafts,
            round_counts,
            round_exclusive_limits,
            drop_annotations,
            self._unevaluated,
            expand_property_names,
        ):
            rule(result)
        self._alternatives(result)
        if "not" in result and (opposite := self._negated(result["not"])) is not None:
            del result["not"]
            add_part(result, opposite)
        expand_contains(result)
        result = {key: map_subschemas(key, value, self._translated) for key, value in result.items()}
        if (reference := result.get("$ref")) in self._definitions and reference not in self._are_wanted:
            self._are_wanted.add(reference)
            self._wanted.append(reference)
        if self._closes and "properties" in result and "patternProperties" not in result:
            result.setdefault("additionalProperties", False)
        return result

    def _unevaluated(self, schema: Schema) -> None:
        """Replace a schema with unevaluated* by an `anyOf` over all combinations of subschemas that may hold. In each
        of them the evaluated properties and items are known."""
        if UNEVALUATED.keys() & schema.keys():
            ways = self._ways(schema, _MAX_DEPTH)
            schema.clear()
            add_part(schema, any_of([all_of(way) for way in ways]))

    def _ways(self, schema: Part, depth: int) -> list[list[Part]]:
        """Return a disjunctive form without unevaluated*: an instance is valid if all schemas of one of the lists
        accept it."""
        if not isinstance(schema, dict):
            return [[schema]]
        result = dict(schema)
        translate_older_drafts(result)
        self._alternatives(result, evaluating=True)
        choices = [self._ways(part, depth - 1) for part in result.pop("allOf", ()) if depth]
        if result.get("$ref") in self._definitions and depth:
            choices.append(self._ways(self._definitions[result.pop("$ref")], depth - 1))
        if "anyOf" in result and depth:
            choices.append([way for option in result.pop("anyOf") for way in self._ways(option, depth - 1)])
        others = {plain: result.pop(key) for key, plain in UNEVALUATED.items() if key in result}
        ways = [[result]]
        for choice in choices:
            if len(ways) * len(choice) > _MAX_WAYS:
                raise OverflowError("unevaluated properties or items depend on too many choices")
            ways = [[*way, *chosen] for way in ways for chosen in choice]
        return [_closed(way, others) for way in ways]

    def _alternatives(self, schema: Schema, *, evaluating: bool = False) -> None:
        """Rewrite `if`, `dependent*` and `oneOf` as `anyOf`. `evaluating`: apply a dependent schema only where its
        property exists."""
        if "if" in schema and {"then", "else"} & schema.keys():
            self._count()
            condition, then, otherwise = (schema.pop(key, True) for key in ("if", "then", "else"))
            add_part(schema, any_of([all_of([condition, then]), all_of([negation(condition), otherwise])]))
        for key in ("dependentRequired", "dependentSchemas"):
            for name, needed in schema.pop(key, {}).items():
                part = {"required": needed} if key == "dependentRequired" else needed
                is_there = _object(required=[name])
                add_part(schema, any_of([negation(is_there), all_of([part, is_there] if evaluating else [part])]))
        if "oneOf" in schema:
            options, common = list(enumerate(schema.pop("oneOf"))), dict(schema)
            pairs = () if _are_discriminated([option for _, option in options]) else combinations(options, 2)
            met = {
                frozenset({first, second})
                for (first, one), (second, other) in pairs
                if not self._is_disjoint({"allOf": [common, one]}, other, _MAX_DEPTH)
            }
            others = [[negation(other) for second, other in options if {first, second} in met] for first, _ in options]
            add_part(
                schema, any_of([all_of([one, *excluded]) for (_, one), excluded in zip(options, others, strict=True)])
            )

    def _negated(self, schema: Part) -> Part:
        """Return the complement of a schema, or None if it cannot be expressed. It may contain negations, which are
        translated later."""
        if isinstance(schema, bool):
            return not schema
        self._count()
        result = dict(schema)
        round_counts(result)
        drop_annotations(result)
        self._alternatives(result)
        opposites = [self._opposites(key, value, result) for key, value in result.items()]
        return None if None in opposites else any_of([part for parts in opposites for part in parts or ()])

    def _opposites(self, key: str, value: Any, siblings: Schema) -> list[Part] | None:
        """Return schemas whose union is the complement of a keyword, or None if it cannot be expressed."""
        if key in _WITHOUT_OPPOSITE or (key == "$ref" and value not in self._definitions):
            return None
        if key in OPPOSITES:
            kind, limit, more = OPPOSITES[key]
            is_known = not isinstance(value, bool) and abs(value) <= _EXACT
            return (
                ([{"type": kind, limit: value + more}] if value + more >= 0 or not more else []) if is_known else None
            )
        match key:
            case "not":
                return [value]
            case "$ref":
                return [negation(self._definitions[value])]
            case "allOf":
                return list(map(negation, value))
            case "anyOf":
                return [all_of(list(map(negation, value)))]
            case "type":
                types = _types(value)  # there is no type for numbers that are not integers
                return ([{"type": sorted(_TYPES - types)}] if types < _TYPES else []) if types <= _TYPES else None
            case "const" | "enum":
                return _other_values(value if key == "enum" else [value])
            case "required":
                return [_object(properties={name: False}, additionalProperties=True) for name in value]
            case "properties":
                named = {name: negation(part) for name, part in value.items()}
                return [_object(required=[n], properties={n: p}, additionalProperties=True) for n, p in named.items()]
            case "additionalProperties":  # an unnamed property exists and violates it
                named = {
                    key: dict.fromkeys(siblings.get(key, ()), False) for key in ("properties", "patternProperties")
                }
                return [_object(minProperties=1, additionalProperties=negation(value), **named)]
            case "prefixItems":
                return [_item_at(index, negation(part)) for index, part in enumerate(value)]
            case "items":
                index = len(siblings.get("prefixItems", ()))
                return None if isinstance(value, list) else [_item_at(index, negation(value))]
            case "contains":
                least, most = siblings.get("minContains", 1), siblings.get("maxContains")
                counts = [{"minContains": 0, "maxContains": least - 1}] if least > 0 else []
                counts += [{"minContains": most + 1}] if most is not None else []
                return [{"type": "array", key: value, **numbers} for numbers in counts]
        return []

    def _is_disjoint(self, one: Part, other: Part, depth: int) -> bool:
        """Whether two schemas are provably disjoint: by type, enumerated values, or a common required property."""
        self._compared += 1
        if depth < 0 or self._compared > _MAX_COMPARED:
            return False
        sides = self._facts(one, set()), self._facts(other, set())
        kinds = frozenset.intersection(_TYPES, *(_kinds(fact) for facts in sides for fact in facts))
        values = [[set(map(_known, given)) for fact in facts if (given := _given(fact))] for facts in sides]
        if not kinds or any(one.isdisjoint(other) for one in values[0] for other in values[1]):
            return True
        for facts, opposite in ((sides[0], other), (sides[1], one)):
            choices = [fact[key] for fact in facts for key in ("anyOf", "oneOf") if key in fact]
            if any(all(self._is_disjoint(option, opposite, depth - 1) for option in options) for options in choices):
                return True
        for name in dict.fromkeys(name for facts in sides for fact in facts for name in fact.get("required", ())):
            first, second = ({"allOf": [_property(fact, name) for fact in facts]} for facts in sides)
            if kinds == {"object"} and self._is_disjoint(first, second, depth - 1):
                return True
        return False

    def _facts(self, schema: Part, followed: set[str]) -> list[Schema]:
        """Return the schemas that every valid instance satisfies: this one, its reference, and its `allOf`."""
        if not isinstance(schema, dict):
            return [] if schema else [{"enum": []}]
        parts = list(schema.get("allOf", ()))
        if (reference := schema.get("$ref")) in self._definitions and reference not in followed:
            followed.add(reference)
            parts.append(self._definitions[reference])
        return [schema, *(fact for part in parts for fact in self._facts(part, followed))]

    def _count(self) -> None:
        self._negated_count += 1
        if self._negated_count > _MAX_NEGATED:
            raise OverflowError("this schema becomes too large where parts of it are negated")


def _are_discriminated(options: Sequence[Part]) -> bool:
    """Whether a required property with distinct constants tells the options apart, as in tagged unions."""
    if not options or not all(isinstance(option, dict) and option.get("type") == "object" for option in options):
        return False
    for name in options[0].get("required", ()):
        declared = [option.get("properties", {}).get(name) for option in options if name in option.get("required", ())]
        words = [part["const"] for part in declared if isinstance(part, dict) and isinstance(part.get("const"), str)]
        if len(set(words)) == len(options):
            return True
    return False


def _closed(way: list[Part], others: Schema) -> list[Part]:
    """Apply the schemas `others` to properties and items that no part evaluates."""
    parts = [part for part in way if isinstance(part, dict)]
    for plain, other in others.items():
        result: Schema = {plain: other}
        if plain == "items":
            result[plain] = any_of([other, *(part["contains"] for part in parts if "contains" in part)])
            result["prefixItems"] = [True] * max(len(part.get("prefixItems", ())) for part in parts)
        else:
            for key in ("properties", "patternProperties"):
                result[key] = {name: True for part in parts for name in part.get(key, ())}
        if not any(plain in part for part in parts):
            way = [*way, result] if len(way) > 1 else [{**result, **way[0]}]
    return way


def _object(**words: Any) -> Schema:
    return {"type": "object", **words}


def _item_at(index: int, part: Part) -> Schema:
    return {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, part]}


def _other_values(values: list[Any]) -> list[Part] | None:
    """Return schemas of all values but these, or None if it cannot be expressed. No list is included if `values`
    contains one, likewise for objects."""
    kinds = set(map(_kind, values))
    result: list[Part] = [{"type": sorted(_TYPES - kinds)}] if kinds < _TYPES else []
    if "boolean" in kinds:
        result += [{"const": flag} for flag in (False, True) if not any(value is flag for value in values)]
    if numbers := sorted({value for value in values if _kind(value) == "number"}):
        if max(map(abs, numbers)) > _EXACT:
            return None
        result.append({"type": "number", "exclusiveMaximum": numbers[0]})
        result += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in pairwise(numbers)]
        result.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    if words := {value for value in values if isinstance(value, str)}:
        result.append({"type": "string", "pattern": _other_words(words)})
    return result


def _other_words(words: set[str]) -> str:
    """Build a regular expression for all strings but these: a string leaves their prefix tree, or ends at an inner
    node."""
    following: dict[str, set[str]] = {word: set() for word in words}
    for word in words:
        for index, letter in enumerate(word):
            following.setdefault(word[:index], set()).add(letter)
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
    """Return a hashable key that is equal for equal values; all lists have the same key, and all objects."""
    return _kind(value), None if isinstance(value, list | dict) else value


def _types(value: Any) -> frozenset[str]:
    listed = value if isinstance(value, list) else [value]
    return frozenset("number" if kind == "integer" else kind for kind in listed)


def _kinds(schema: Schema) -> frozenset[str]:
    types, given = _types(schema.get("type", list(_TYPES))), _given(schema)
    return types if given is None else types & set(map(_kind, given))


def _given(schema: Schema) -> list[Any] | None:
    """Return the values of `const` or `enum`, or None if there is neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _composes(schema: Part) -> bool:
    """Whether several schemas may apply to one object, so that no single one names all of its properties."""
    found = False

    def look(inner: Schema) -> None:
        nonlocal found
        several = {"properties", *UNEVALUATED} & inner.keys() and _PLACED & inner.keys()
        exclusive = "oneOf" in inner and "discriminator" not in inner
        conditional = "dependentSchemas" in inner or ("if" in inner and {"then", "else"} & inner.keys())
        found = found or bool(several or exclusive or conditional) or len(inner.get("allOf", ())) > 1
        for key, value in inner.items():
            map_subschemas(key, value, look)

    if isinstance(schema, dict):
        look(schema)
    return found
