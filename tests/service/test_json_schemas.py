"""Schemas said otherwise mean the same: what their grammars accept validates, by the public suite of JSON schemas."""

import json
import subprocess
import sys
import tarfile
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from benchmarks.schema_suite import Case, read_suite
from service import json_schemas
from service.grammars import Grammar, GrammarCompiler, GrammarError
from service.json_schemas import restated
from service.tokenizer import ChatTokenizer
from tests.tiny_models import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
EOS = TOKENIZER.special_ids["<|end|>"]
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({EOS}))
PACKAGE = "jsonschema==4.26.0"
"""Its source holds the suite."""
LEAST_ACCEPTED = 0.66


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
    matcher = grammar._matcher.deep_copy()
    return bool(matcher.consume_tokens([*TOKENIZER.encode(json.dumps(value, ensure_ascii=False)), EOS]))


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
    ],
)  # fmt: skip
def test_what_is_said_otherwise(schema: dict[str, Any], good: Any, bad: Any) -> None:
    validator, grammar = Draft202012Validator(schema), grammar_of(schema)
    assert validator.is_valid(good)
    assert accepts(grammar, good)
    assert not validator.is_valid(bad)
    assert not accepts(grammar, bad)


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
    assert restated(schema) == schema


def test_the_given_schema_is_not_changed() -> None:
    schema = {"properties": {"a": {"contains": {}, "minContains": 0, "minItems": 1.0}}}
    before = json.dumps(schema)
    restated(schema)
    assert json.dumps(schema) == before


OTHERS = {"type", "not", "enum", "const", "format", "propertyNames", "dependentRequired", "required", "$ref"}

KEYWORDS = sorted(json_schemas._INSIDE | json_schemas._LISTED | json_schemas._NAMED | json_schemas._COUNTS | OTHERS)


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
