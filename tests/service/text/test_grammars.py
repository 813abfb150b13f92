"""Grammars of every kind are honoured, and one that cannot be is refused with its place."""

from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from service.text.grammars import GrammarCompiler, GrammarError, GrammarKind
from tests.service.text.grammar_parts import EOS, TOKENIZER, matches


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({EOS}))


def accepts(compiler: GrammarCompiler, kind: GrammarKind, source: JsonValue, text: str) -> bool:
    """Whether the text is one of the grammar's, whole."""
    return matches(compiler.compile(kind, source), text)


@pytest.mark.parametrize(
    ("kind", "source", "good", "bad"),
    [
        ("regex", "[a-c]{2}[0-9]+", "ab12", "ad1"),
        ("choice", ["yes", 'no\nnot "now"'], 'no\nnot "now"', "maybe"),
        ("grammar", 'root ::= "a" ("b" | "c")+', "abc", "ba"),
        ("grammar", 'start: "a" ("b" | "c")+', "acb", "a"),
        ("json_schema", {"type": "object"}, '{"a": [1, null]}', '{"a":[1, null]}'),
        ("json_schema", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, "12", '"12"'),
    ],
)
def test_kinds(compiler: GrammarCompiler, kind: GrammarKind, source: JsonValue, good: str, bad: str) -> None:
    assert accepts(compiler, kind, source, good)
    assert not accepts(compiler, kind, source, bad)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"enum": ["a<|end|>b"]}),
        ("json_schema", {"const": "<|end|>"}),
        ("json_schema", {"type": "object", "properties": {"<|end|>": {"const": "<|start|>"}}, "required": ["<|end|>"]}),
        ("json_schema", {"type": "string", "pattern": "^a<\\|end\\|>b$"}),
        ("choice", ["<|end|>a", "<|start|>"]),
        ("regex", "a<\\|(end|start)\\|>b"),
        ("grammar", 'root ::= "a" "<|end|>" [bc]'),
        ("lark", 'start: "<|end|>" /a<.end.>/'),
    ],
)
def test_names_of_special_tokens_are_text_in_a_literal(
    compiler: GrammarCompiler, kind: GrammarKind, source: JsonValue
) -> None:
    """Whichever allowed token is chosen, no special one is but the end's, and the text is whole then."""
    specials = set(TOKENIZER.special_ids.values())
    for first in (0, -1):
        state, text = compiler.compile(kind, source).begin(), list[int]()
        while EOS not in text:
            mask = np.zeros((TOKENIZER.vocab_size + 7) // 8, dtype=np.uint8)
            state.fill(mask, ())
            allowed = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            assert not specials - {EOS} & set(allowed)
            assert not specials & set(state.forced(()) or ())
            text.append(int(allowed[first]))
            if text[-1] != EOS:
                state.extend(text[-1:])
            assert len(text) < 64
        assert "<|" in TOKENIZER.decode(text[:-1])


def test_a_grammar_of_ones_own_may_name_special_tokens(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile("lark", 'start: "a" <|start|> "b"')._matcher.deep_copy()
    assert matcher.consume_tokens([*TOKENIZER.encode("a"), TOKENIZER.special_ids["<|start|>"], *TOKENIZER.encode("b")])


def test_a_token_that_leaves_the_form_raises(compiler: GrammarCompiler) -> None:
    state = compiler.compile("regex", "ab").begin()
    with pytest.raises(RuntimeError, match="does not allow"):
        state.extend(TOKENIZER.encode("ac"))


@pytest.mark.parametrize(
    ("schema", "path", "words"),
    [
        ({"type": "strin"}, (), "strin"),
        ({"properties": {"a": {"items": {"not": {"pattern": "x"}}}}}, ("properties", "a", "items"), "not"),
        ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, ("anyOf", "1"), "uniqueItems"),
        ({"$ref": "#/$defs/b", "$defs": {"b": {"pattern": "(?=x)", "type": "string"}}}, ("$defs", "b"), "look"),
        ({"properties": {"a": {"$ref": "#/$defs/gone"}}}, ("properties", "a"), "gone"),
        ({"properties": {"a": {"contains": {}, "minContains": "x"}}}, ("properties", "a"), "not a valid JSON schema"),
        ({"allOf": 5}, (), "not a valid JSON schema"),
        ({"contains": {}, "minContains": 10**9}, (), "contains"),
    ],
)
def test_what_cannot_be_honoured_is_named(
    compiler: GrammarCompiler, schema: dict[str, Any], path: tuple[str, ...], words: str
) -> None:
    with pytest.raises(GrammarError, match=words) as raised:
        compiler.compile("json_schema", schema)
    assert raised.value.path == path
    assert not str(raised.value).startswith("at ")


def test_a_tokenizer_that_no_one_can_read_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "backend_json", lambda: "{}", raising=False)
    with pytest.raises(GrammarError, match="this model's tokenizer"):
        GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({EOS})).compile("regex", "a")


@pytest.mark.parametrize(
    ("kind", "source"), [("regex", "(a"), ("grammar", "no grammar at all {"), ("json_schema", ["a"]), ("lark", "x")]
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCompiler, kind: GrammarKind, source: JsonValue) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(kind, source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"enum": ["a", -(2**63)]}),
        ("json_schema", {"properties": {"a": {"const": [-(2**63) + 1]}}}),
        ("lark", 'start: %json {"const": -9223372036854775808}'),
    ],
)
def test_an_integer_that_would_end_the_process_is_refused(
    compiler: GrammarCompiler, kind: GrammarKind, source: JsonValue
) -> None:
    with pytest.raises(GrammarError, match=r"the integer -92233720368547758\d\d is not supported"):
        compiler.compile(kind, source)


def test_other_large_integers_are_honoured(compiler: GrammarCompiler) -> None:
    for number in (-(2**62), 2**62):
        assert accepts(compiler, "json_schema", {"const": number}, str(number))
