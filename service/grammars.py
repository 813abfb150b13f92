"""Grammars as clients write them, compiled once for all who send the same (JSON schemas, regular expressions, choices,
and grammars in Lark's or GBNF's form), and where a text stands in one.

llguidance (https://github.com/guidance-ai/llguidance) compiles grammars and walks them; a text's matcher stands behind
its last committed token, and is moved down a path and back again for every node."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import JsonValue

from service.json_schemas import DEFINITIONS, Schema, restated
from service.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # which is known to type checkers alone

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]

_MOST_KEPT = 256  # compiled grammars
_MOST_TRIED = 256  # parts of a schema that are compiled to find the one that cannot be honoured
_MOST_DROPPED = 32  # of one schema
_JSON_FORM: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python writes it: with free whitespace little is certain, and small models never end."""
_LARGE = re.compile(r"-9223372036854775\d{3}(?![\d.eE])")
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class Grammar:
    """A compiled grammar. Requests share it; each of their sequences begins a text of its own."""

    def __init__(self, matcher: LLMatcher) -> None:
        """`matcher`: at the grammar's beginning; it stays there."""
        self._matcher = matcher

    def begin(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def extend(self, tokens: Sequence[int]) -> None:
        """Move behind tokens that were committed. Raises RuntimeError where one is not allowed there: the text would
        have left its form."""
        if self._matcher.try_consume_tokens(list(tokens)) != len(tokens):
            raise RuntimeError(f"the grammar does not allow the tokens {list(tokens)} that were chosen")

    def fill(self, mask: np.ndarray, path: Sequence[int]) -> None:
        """Write which tokens may stand behind this path. # mask [vocab bits] uint8"""
        with self._behind(path) as is_possible:
            if self._matcher.is_error():  # it grew beyond a limit: nothing may stand there, and the text ends
                mask[:] = 0
            elif is_possible:
                mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: mask.shape[0]]
            else:  # nobody gets there: the token above is never chosen
                mask[:] = 0xFF

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Whether a token may stand behind this path, known without a mask; what only ends a finished text is not."""
        forced = self.forced(path)
        if forced is None or forced:
            return forced is not None and token == forced[0]
        with self._behind([*path, token]) as is_possible:
            return is_possible

    def forced(self, path: Sequence[int]) -> list[int] | None:
        """Tokens that must stand behind this path, as far as the grammar leaves no choice of characters; None where the
        path itself is impossible."""
        with self._behind(path) as is_possible:
            return self._matcher.compute_ff_tokens() if is_possible else None

    @contextmanager
    def _behind(self, path: Sequence[int]) -> Iterator[bool]:
        """While it lasts the matcher stands behind as much of a path as is possible; yields whether that is all."""
        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        yield consumed == len(path)
        if consumed:
            self._matcher.rollback(consumed)


class GrammarError(ValueError):
    """A grammar that cannot be honoured; `path` leads into the schema."""

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class GrammarCompiler:
    """May be called from any thread; compiling takes milliseconds, for large schemas seconds."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)
        self._relaxed = lru_cache(_MOST_KEPT)(self._relax)

    def compile(self, kind: GrammarKind, source: JsonValue) -> Grammar:
        """`source`: the schema, the expression, the list of choices, the grammar. Raises GrammarError."""
        return self._compiled(kind, json.dumps(source))

    def relaxed(self, schema: Schema) -> tuple[Schema, tuple[tuple[str, ...], ...]]:
        """A schema that can be honoured and allows whatever this one does, and the paths of what it leaves out."""
        return self._relaxed(json.dumps(schema))

    def _relax(self, source: str) -> tuple[Schema, tuple[tuple[str, ...], ...]]:
        schema: Schema = json.loads(source)
        dropped: list[tuple[str, ...]] = []
        while len(dropped) < _MOST_DROPPED:
            try:
                self.compile("json_schema", schema)
                return schema, tuple(dropped)
            except GrammarError as error:
                part = _part_at(schema, error.path)
                dropped.append((*error.path, *self._drop_from(part, schema)))
        return {"type": "object"}, ((),)

    def _drop_from(self, part: Schema, schema: Schema) -> tuple[str, ...]:
        """Make a part less strict; returns the keyword that was dropped, or nothing where all were."""
        beside = {name: schema[name] for name in DEFINITIONS if name in schema}
        rest = {key: value for key, value in part.items() if key not in DEFINITIONS}
        alone = (key for key in rest if self._is_refused({key: rest[key], **beside}))
        decisive = (key for key in rest if not self._is_refused({**_without(rest, key), **beside}))
        at_fault = next(chain(alone, decisive), None)
        if at_fault is None:
            part.clear()
            return ()
        value = part.pop(at_fault)
        if at_fault == "oneOf" and "anyOf" not in part and not self._is_refused({"anyOf": value, **beside}):
            part["anyOf"] = value  # any of them, where one could not be told from the others
        return (at_fault,)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Raises GrammarError for a tokenizer whose tokens are no strings of bytes."""
        try:
            size = max(self._vocab_size, self._tokenizer.vocab_size)  # nobody chooses those beyond the target's
            tokens = LLTokenizer(self._tokenizer.backend_json(), n_vocab=size)
            return LLTokenizer(_LiteralTokenizer(self._tokenizer, tokens), eos_token=self._eos_ids)
        except Exception as error:  # whatever its library says
            raise GrammarError(f"this model's tokenizer cannot be bound to a grammar: {error}") from error

    def _compile(self, kind: GrammarKind, source: str) -> Grammar:
        value = json.loads(source)
        try:
            matcher = self._matcher_of(kind, value)
        except GrammarError as error:
            raise GrammarError(str(error), self._path(kind, value)) from error
        if matcher.is_error():
            raise GrammarError(_first_line(matcher.get_error()), self._path(kind, value))
        begun = matcher.deep_copy()
        begun.compute_bitmask()
        if begun.is_stopped() and not begun.is_accepting():
            raise GrammarError("no text is of this form")
        return Grammar(matcher)

    def _path(self, kind: GrammarKind, value: Any) -> tuple[str, ...]:
        """To the part of a schema that cannot be honoured."""
        return next(self._faulty(value), ()) if kind == "json_schema" and isinstance(value, dict) else ()

    def _faulty(self, schema: Any) -> Iterator[tuple[str, ...]]:
        """Where in a schema the part stands that cannot be honoured, the innermost first."""
        beside = {name: schema[name] for name in DEFINITIONS if name in schema}
        tried = 0

        def search(part: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
            nonlocal tried
            for name, inner in _parts(part):
                tried += 1
                if tried <= _MOST_TRIED and self._is_refused({**inner, **beside}):
                    yield from search(inner, (*path, *name))
                    yield (*path, *name)

        yield from search(schema, ())

    def _is_refused(self, schema: dict[str, Any]) -> bool:
        try:
            return self._matcher_of("json_schema", schema).is_error()
        except GrammarError:
            return True

    def _matcher_of(self, kind: GrammarKind, value: Any) -> LLMatcher:
        told = in_lark(kind, value)
        _refuse_the_least_integer(told)
        return LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(told), log_level=0)


class _LiteralTokenizer(TokenizerWrapper):
    """A tokenizer as llguidance calls it, to which the names of special tokens are text.

    The one that llguidance makes itself writes the literal "<|im_end|>" as the special token of that name, which ends
    the text; and it takes every added token named <...> for a special one, as Qwen's <tool_call>, which is text.
    """

    def __init__(self, tokenizer: ChatTokenizer, tokens: LLTokenizer) -> None:
        """`tokens`: which knows the bytes of each token."""
        beyond = range(tokenizer.vocab_size, tokens.vocab_size)
        self.eos_token_id, self.bos_token_id = 0, None  # those that end a text are named beside
        self.tokens = [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)]
        self.special_token_ids = [*tokenizer.special_ids.values(), *beyond]
        self.is_tokenizer_wrapper = True
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _refuse_the_least_integer(told: str) -> None:
    """llguidance 1.9 never returns from an integer whose size is none of 64 bits, and takes the process along.
    Raises GrammarError."""
    for found in _LARGE.findall(told):
        if float(found) == -(2.0**63):
            raise GrammarError(f"the integer {found} cannot be honoured")


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}


def _part_at(schema: Schema, path: Sequence[str]) -> Schema:
    part: Any = schema
    for name in path:
        part = part[int(name)] if isinstance(part, list) else part[name]
    found: Schema = part
    return found


def _parts(schema: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The schemas directly inside one, with their paths."""
    for key, value in schema.items():
        if isinstance(value, dict) and key in ("properties", "patternProperties", *DEFINITIONS):
            yield from (((key, name), inner) for name, inner in value.items() if isinstance(inner, dict))
        elif isinstance(value, dict):
            yield (key,), value
        elif isinstance(value, list):
            yield from (((key, str(place)), inner) for place, inner in enumerate(value) if isinstance(inner, dict))


def in_lark(kind: GrammarKind, value: Any) -> str:
    """A grammar in Lark's form. Raises GrammarError."""
    if kind == "json_schema":
        return f"start: {json_rule(value)}"
    if kind == "regex":
        written: str = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
        return written
    if kind == "choice":
        return "start: " + " | ".join(json.dumps(choice) for choice in value)
    if kind == "lark":
        return str(value)
    try:
        return str(any_to_lark(value))
    except Exception as error:  # of a parser that names no kinds of its own
        raise GrammarError(f"neither Lark's form nor GBNF: {error}") from error


def json_rule(schema: JsonValue) -> str:
    """Right side of a rule in Lark's form. Raises GrammarError for what is no schema."""
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object")
    try:
        told = restated(schema)
    except OverflowError as error:
        raise GrammarError(str(error)) from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:  # keywords with values of other types
        raise GrammarError(f"this is no JSON schema: {error}") from error
    return f"%json {json.dumps({**told, 'x-guidance': _JSON_FORM})}"


def _first_line(message: str) -> str:
    """Without the place in our own words before it, and the grammar that is quoted below it."""
    return _PLACE.sub("", message.strip()).partition("\n   1 |")[0].strip()
