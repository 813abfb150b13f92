"""Schemas written otherwise mean the same: what their grammars accept is valid by the public suite of JSON schemas."""

import json
import subprocess
import sys
import tarfile
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from benchmarks.schema_suite import Case, read_suite
from service.text.grammars import Grammar, GrammarError
from service.text.json_schemas import translated
from tests.service.text.grammar_parts import COMPILER, matches

PACKAGE = "jsonschema==4.26.0"
"""Its source holds the suite."""
LEAST_ACCEPTED = 0.85


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """The public suite for draft 2020-12, as the package of a validator ships it."""
    folder = tmp_path_factory.mktemp("suite")
    words = ["download", "-q", "--no-deps", "--no-binary", "jsonschema", "--dest", str(folder), PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=300)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (draft,) = folder.glob("*/json/tests/draft2020-12")
    return read_suite(draft)


def accepts(grammar: Grammar, value: Any) -> bool:
    return matches(grammar, json.dumps(value, ensure_ascii=False))


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return COMPILER.compile("json_schema", schema)


def test_the_public_suite(suite: list[Case]) -> None:
    """No grammar accepts what its schema refuses; a part of the suite is refused, most of it whole keywords."""
    assert len(suite) > 300
    accepted, unsound, missed, valid = 0, [], 0, 0
    for case in suite:
        if not isinstance(case.schema, dict):
            continue
        try:
            grammar = grammar_of(case.schema)
        except GrammarError:
            continue
        accepted += 1
        for test in case.tests:
            is_accepted = accepts(grammar, test["data"])
            if is_accepted and not test["valid"]:
                unsound.append((case.description, test["description"]))
            valid += test["valid"]
            missed += test["valid"] and not is_accepted
    assert unsound == []
    assert accepted / len(suite) >= LEAST_ACCEPTED
    assert missed / valid < 0.08  # a grammar may be narrower: numbers in other forms, contained items first


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "minItems": 2.0}, [1, 2], [1]),
        ({"type": "string", "format": "path"}, "/tmp", 1),
        ({"type": "object", "propertyNames": {"enum": ["u", "v"]}, "additionalProperties": {"type": "integer"}},
         {"u": 1}, {"w": 1}),
        ({"type": "object", "propertyNames": {"pattern": "^a+$"}}, {"aa": 1}, {"b": 1}),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, {"aa": 1}, {"aaa": 1}),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
            {"aa": 1},
            {"aa": "1"},
        ),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
        ({"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
         {"b": 1}, {"a": 1, "b": 2}),
        ({"properties": {"a": {"type": "integer"}}, "type": "object", "unevaluatedProperties": False},
         {"a": 1}, {"c": 1}),
        ({"prefixItems": [{"type": "integer"}], "type": "array", "unevaluatedItems": False}, [1], [1, 2]),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 5}}, [7, 1], [1, 2]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [2], {}),
        ({"not": {"type": ["string", "object"]}}, [1], "a"),
        ({"then": {"type": "null"}, "type": "integer"}, 1, "a"),
        ({"type": "string", "not": {"enum": ["a", "ab", "c"]}}, "abc", "ab"),
        ({"type": "number", "not": {"enum": [1, 1.5]}}, 1.2, 1),
        ({"not": {"const": True}}, False, True),
        ({"type": "integer", "not": {"minimum": 3}}, 2, 3),
        ({"type": "string", "not": {"maxLength": 2}}, "abc", "ab"),
        ({"type": "object", "not": {"required": ["a", "b"]}}, {"a": 1}, {"a": 1, "b": 1}),
        ({"type": "object", "not": {"properties": {"a": {"type": "integer"}}}}, {"a": "b"}, {"a": 1}),
        ({"type": "object", "not": {"additionalProperties": {"type": "integer"}}}, {"a": "b"}, {"a": 1}),
        ({"type": "array", "not": {"items": {"type": "integer"}}}, ["a", 1], [1]),
        ({"type": "array", "not": {"prefixItems": [{}, {"const": 1}]}}, [1, 2], [2, 1]),
        ({"type": "array", "not": {"contains": {"const": 1}}}, [2], [2, 1]),
        ({"not": {"anyOf": [{"type": "string"}, {"allOf": [{"type": "integer"}, {"minimum": 2}]}]}}, 1, 2),
        ({"not": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, 3, 1),
        ({"not": {"not": {"type": "string"}}}, "a", 1),
        ({"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "string"}}}, 1, "a"),
        ({"not": {"dependentSchemas": {"a": {"enum": [1]}}}}, {"a": 1}, None),
        ({"if": {"properties": {"k": {"const": "a"}}, "required": ["k"]}, "then": {"required": ["x"]},
          "else": {"required": ["y"]}, "type": "object"}, {"k": "a", "x": 1}, {"k": "a", "y": 1}),
        ({"if": {"type": "string"}, "then": False}, 1, "a"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, 1, 2),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"}, {"b": 1}, {"a": 1, "b": 1}),
        ({"oneOf": [{"properties": {"a": {"type": "string", "pattern": "x"}}, "required": ["a"],
                     "additionalProperties": False},
                    {"required": ["b"]}], "type": "object"}, {"a": "x"}, {"a": "y"}),
        ({"allOf": [{"properties": {"a": {"type": "integer"}}}], "properties": {"b": {}}, "type": "object",
          "unevaluatedProperties": False}, {"b": 1, "a": 1}, {"b": 1, "c": 1}),
        ({"anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"$ref": "#/$defs/b"}], "type": "object",
          "unevaluatedProperties": {"type": "null"}, "$defs": {"b": {"properties": {"b": {}}, "required": ["b"]}}},
         {"b": 1, "c": None}, {"b": 1, "c": 1}),
        ({"dependentSchemas": {"a": {"properties": {"b": {}}}}, "properties": {"a": {}}, "type": "object",
          "unevaluatedProperties": False}, {"a": 1, "b": 1}, {"b": 1}),
        ({"allOf": [{"prefixItems": [{"type": "string"}], "contains": {"const": 1}}], "type": "array",
          "unevaluatedItems": False}, ["a", 1], ["a", 1, 2]),
        ({"contains": {"const": 1}, "maxContains": 2, "type": "array"}, [1, 1, 2], [1, 1, 1]),
        ({"contains": {"const": 1}, "prefixItems": [{"type": "integer"}], "type": "array"}, [2, 1], [2, 2]),
        ({"$dynamicRef": "#a", "$defs": {"b": {"$dynamicAnchor": "a", "type": "string"}}}, "a", 1),
        ({"$ref": "b.json", "$id": "https://a.org/a.json",
          "$defs": {"b": {"$id": "/b.json", "items": {"$ref": "#/$defs/c"}, "$defs": {"c": {"type": "integer"}}},
                    "c": {"type": "string"}}}, [1], ["a"]),
        ({"properties": {"a": {"if": {"$anchor": "x", "type": "string"}}, "b": {"$ref": "#x"}}, "type": "object"},
         {"b": "a"}, {"b": 1}),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, 0.25, 0),
    ],
)  # fmt: skip
def test_what_is_written_otherwise(schema: dict[str, Any], good: Any, bad: Any) -> None:
    validator, grammar = Draft202012Validator(schema), grammar_of(schema)
    assert validator.is_valid(good)
    assert accepts(grammar, good)
    assert not validator.is_valid(bad)
    assert not accepts(grammar, bad)


OLDER = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**OLDER, "type": "array", "contains": {"const": 1}}, [1], [2]),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": False}, [1], [1, 2]),
        ({"type": "array", "items": [{"const": 1}], "contains": {"const": 2}}, [1, 2], [2]),
        ({"type": "object", "dependencies": {"a": ["b"]}}, {"b": 1}, {"a": 1}),
        ({"type": "object", "dependencies": {"a": {"required": ["b"]}}}, {"b": 1}, {"a": 1}),
    ],
)
def test_words_of_older_drafts(schema: dict[str, Any], good: Any, bad: Any) -> None:
    assert Draft7Validator(schema).is_valid(good)
    assert accepts(grammar_of(schema), good)
    assert not Draft7Validator(schema).is_valid(bad)
    assert not accepts(grammar_of(schema), bad)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"multipleOf": 2}}, "not"),
        ({"not": {"type": "string", "pattern": "a"}}, "not"),
        ({"if": {"format": "email"}, "else": {"type": "null"}}, "not"),
        ({"type": "array", "contains": {"multipleOf": 2}, "maxContains": 1}, "not"),
        ({"$recursiveRef": "#"}, "dynamicRef"),
        ({"$defs": {"a": {"not": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}, "no text"),
        ({"$ref": "#"}, "no text"),
        ({"allOf": [{"anyOf": [{"required": [str(n)]} for n in range(9)]}] * 2, "unevaluatedProperties": False},
         "too many choices"),
        ({"$ref": "#/$defs/a", "unevaluatedProperties": False,
          "$defs": {"a": {"$id": "b", "$ref": "#/$defs/gone"}, "gone": {"type": "string"}}}, "not present"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        grammar_of(schema)


def test_many_options_that_a_property_tells_apart_stay_small() -> None:
    options = [
        {"$ref": "#/$defs/base", "properties": {"kind": {"const": f"k{n}"}, "a": {"pattern": "x", "type": "string"}}}
        for n in range(40)
    ]
    schema = {"oneOf": options, "$defs": {"base": {"type": "object", "required": ["kind"]}}}
    assert len(json.dumps(translated(schema))) < 3 * len(json.dumps(schema))
    assert accepts(grammar_of(schema), {"kind": "k7", "a": "x"})
    assert not accepts(grammar_of(schema), {"kind": "k40"})


def test_many_options_of_one_kind_each_are_not_compared() -> None:
    options = [
        {"type": "object", "properties": {"kind": {"const": f"k{n}"}, "v": {"type": "string"}}, "required": ["kind"]}
        for n in range(600)
    ]
    assert len(translated({"oneOf": options})["anyOf"]) == 600
    with pytest.raises(OverflowError):  # two of one kind: all are compared
        translated({"oneOf": [*options, {**options[0], "required": ["kind", "v"]}]})


def test_what_grows_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        schema = {"if": schema, "then": {"minLength": 1}}
    with pytest.raises(GrammarError, match="too large"):
        grammar_of(schema)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (NAMED, True),
        ({**NAMED, "additionalProperties": True}, False),
        ({**NAMED, "patternProperties": {"^x": True}}, False),
        ({"type": "object"}, False),
        ({"allOf": [NAMED, {"properties": {"b": True}}]}, False),
        ({**NAMED, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, False),
        ({"oneOf": [{**NAMED, "required": ["a"]}, {"type": "null"}]}, False),
    ],
)
def test_an_object_holds_the_properties_that_one_schema_names(schema: dict[str, Any], is_closed: bool) -> None:
    assert accepts(grammar_of(schema), {"a": 1})
    assert accepts(grammar_of(schema), {"a": 1, "b": 1, "xyz": 2}) is not is_closed


def test_what_is_no_schema_is_left_as_it_is() -> None:
    schema = {"properties": {"not": {"enum": [{"if": 1.0, "properties": {}}]}}, "additionalProperties": False}
    assert translated(schema) == schema


def test_the_given_schema_is_not_changed() -> None:
    schema = {"properties": {"a": {"contains": {}, "minContains": 0, "minItems": 1.0}}}
    before = json.dumps(schema)
    translated(schema)
    assert json.dumps(schema) == before


OTHERS = {"then", "else", "minContains", "maxContains", "$defs", "definitions"}
KEYWORDS = sorted(OTHERS | Draft202012Validator.VALIDATORS.keys() | Draft7Validator.VALIDATORS.keys())


def keywords(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=3)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | keywords(inner),
    max_leaves=8,
)


@given(keywords(JSON_VALUES))
def test_whatever_is_sent_is_a_grammar_or_a_refusal(schema: dict[str, Any]) -> None:
    with suppress(GrammarError):
        grammar_of(schema)


def schemas_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    several, named = st.lists(inner, min_size=1, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    words = {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("properties", "dependentSchemas"), named),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "additionalProperties"), inner),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), inner),
        **dict.fromkeys(("minItems", "maxItems", "minLength", "maxContains", "minContains"), st.integers(0, 2)),
        **dict.fromkeys(("minimum", "exclusiveMaximum"), st.sampled_from([0, 1, 1.5, 2])),
        "required": st.lists(st.sampled_from("abc"), unique=True, max_size=2),
        "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3),
        "type": st.sampled_from(["string", "integer", "number", "object", "array", "null"]),
        "$ref": st.just("#/$defs/x"),
    }
    return st.sets(st.sampled_from(sorted(words)), min_size=1, max_size=3).flatmap(
        lambda keys: st.fixed_dictionaries({key: words[key] for key in sorted(keys)})
    )


VALUES: list[Any] = [
    *(None, True, 0, 1, 1.5, 2, "", "a", "ab", [], [1], ["a", 1], [1, 1], [[1]], {}),
    *({"a": 1}, {"b": "a"}, {"a": "a", "b": 1}, {"c": 1}, {"a": {"a": 1}}, {"a": [1]}, {"a": 1, "b": 1, "c": None}),
]


SCHEMAS: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), schemas_of, max_leaves=8)


@given(schemas_of(SCHEMAS), SCHEMAS)
@settings(max_examples=400)
def test_no_grammar_lets_through_what_its_schema_refuses(schema: dict[str, Any], definition: Any) -> None:
    schema = {**schema, "$defs": {"x": definition}}
    with suppress(GrammarError, RecursionError):  # of a validator, for what refers to itself
        grammar, validator = grammar_of(schema), Draft202012Validator(schema)
        assert [value for value in VALUES if accepts(grammar, value) and not validator.is_valid(value)] == []
