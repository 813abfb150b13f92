"""Grammars of clients (JSON schemas, regular expressions, choices, Lark and GBNF), and the position of a text in its
grammar.

llguidance (https://github.com/guidance-ai/llguidance) compiles grammars and matches tokens. The matcher of a text is
positioned after its last committed token; for a node of a tree it moves down the path and back again.
"""

import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from pydantic import JsonValue

from service.text.json_schemas import translated
from service.text.schema_keywords import DEFINITIONS, Schema, with_definitions
from service.text.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # present in type stubs only

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work in steps of at most one compilation each; it can be abandoned after any step."""

_MAX_CHARACTERS = 2**18
"""Length limit of a grammar in Lark syntax. llguidance, which cannot be interrupted, needs about two seconds for the
slowest grammars found of this length; as functions they would fill 65,000 prompt tokens."""
_MAX_PARTS = 8_000  # limit on rules plus objects in a schema
STACK_BYTES = 2**26
"""Stack size of compiling threads. llguidance recurses over rules and references, and a stack overflow ends the
process. Measured: up to 3.5 kB per rule, 6.7 kB per object."""
_MAX_GBNF_RULES = 1_000  # llguidance converts this many in two seconds, in quadratic time
_MAX_TRIED = 256  # subschemas compiled while searching for the unsupported one
_MAX_DROPPED = 32  # unsupported keywords removed from one schema before it is replaced by any object
_JSON_FORM: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as `json.dumps` writes it. With free whitespace few tokens are forced, and small models emit it
without end."""
_LARGE = re.compile(r"-9223372036854775\d{3}(?![\d.eE])")
_PLACE = re.compile(r"^at \d+\(\d+\): ")


class Grammar:
    """Compiled grammar, shared by requests. Each sequence has its own GrammarState."""

    def __init__(self, matcher: LLMatcher, num_characters: int) -> None:
        """`matcher` is positioned at the start and never advanced. `num_characters`: length in Lark syntax; memory use
        is about 100 bytes per character."""
        self._matcher = matcher
        self.num_characters = num_characters

    def begin(self) -> "GrammarState":
        """Create a state at the start of the grammar."""
        return GrammarState(self._matcher.deep_copy())


class GrammarState:
    """Position of one sequence in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def extend(self, tokens: Sequence[int]) -> None:
        """Advance over committed tokens. Raises RuntimeError if the grammar does not allow one of them."""
        if self._matcher.try_consume_tokens(list(tokens)) != len(tokens):
            raise RuntimeError(f"the grammar does not allow the tokens {list(tokens)} that were chosen")

    def fill(self, mask: np.ndarray, path: Sequence[int]) -> None:
        """Write the bitmask of tokens allowed after this path. # mask [vocab / 8] uint8"""
        with self._after(path) as is_possible:
            if self._matcher.is_error():  # a limit of llguidance is exceeded: no token is allowed, which ends the text
                mask[:] = 0
            elif is_possible:
                mask[:] = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: mask.shape[0]]
            else:  # unreachable node: its mask is never used
                mask[:] = 0xFF

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Return whether a token is allowed after this path, without computing a mask. False for end tokens."""
        forced = self.forced(path)
        if forced is None or forced:
            return forced is not None and token == forced[0]
        with self._after([*path, token]) as is_possible:
            return is_possible

    def forced(self, path: Sequence[int]) -> list[int] | None:
        """Return the tokens that the grammar forces after this path, or None if the path itself is impossible."""
        with self._after(path) as is_possible:
            return self._matcher.compute_ff_tokens() if is_possible else None

    @contextmanager
    def _after(self, path: Sequence[int]) -> Iterator[bool]:
        """Advance the matcher along a path for the duration of the block. Yields whether the whole path is possible."""
        consumed = self._matcher.try_consume_tokens(list(path)) if path else 0
        yield consumed == len(path)
        if consumed:
            self._matcher.rollback(consumed)


class GrammarError(ValueError):
    """Grammar that cannot be enforced. `path`: location in the schema."""

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


class GrammarBudgetError(Exception):
    """The time budget of a request is used up. Not a GrammarError, which `fitting` handles by removing keywords."""

    path: tuple[str, ...] = ()


def finished(steps: Steps[Result]) -> Result:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


class GrammarCompiler:
    """Compiles grammars. Thread-safe; a step takes milliseconds, seconds for large schemas."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    def compile(self, kind: GrammarKind, source: JsonValue) -> Grammar:
        """Compile a grammar. `source`: a schema, an expression, a list of choices or a grammar. Raises GrammarError."""
        return finished(self.compiling(kind, source))

    def compiling(self, kind: GrammarKind, source: JsonValue) -> Steps[Grammar]:
        """Compile a grammar in steps. Raises GrammarError."""
        yield
        try:
            matcher, num_characters = self._matcher_of(kind, source)
        except GrammarError as error:
            raise GrammarError(str(error), (yield from self._path(kind, source))) from error
        if matcher.is_error():
            raise GrammarError(_refusal(matcher), (yield from self._path(kind, source)))
        begun = matcher.deep_copy()
        begun.compute_bitmask()
        if begun.is_stopped() and not begun.is_accepting():
            raise GrammarError("no text matches it")
        return Grammar(matcher, num_characters)

    def fitting(self, given: Schema, *, strict: bool) -> Steps[tuple[Schema, tuple[tuple[str, ...], ...]]]:
        """Relax a schema until it can be enforced. Returns a schema that can be embedded in another one, and the paths
        of the removed keywords. `strict`: raise GrammarError instead of removing any."""
        schema: Schema = json.loads(json.dumps(with_definitions(given)))
        dropped: list[tuple[str, ...]] = []
        while len(dropped) < _MAX_DROPPED:
            try:
                yield from self.compiling("json_schema", schema)
                return schema, tuple(dropped)
            except GrammarError as error:
                if strict:
                    raise
                part = _part_at(schema, error.path)
                dropped.append((*error.path, *(yield from self._drop_from(part, schema))))
        return {"type": "object"}, ((),)

    def _drop_from(self, part: Schema, schema: Schema) -> Steps[tuple[str, ...]]:
        """Remove the unsupported keyword from a subschema and return it; if there is no single one, remove all and
        return an empty tuple."""
        definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
        rest = {key: value for key, value in part.items() if key not in DEFINITIONS}
        alone = ((key, {key: rest[key], **definitions}, True) for key in rest)
        decisive = ((key, {**_without(rest, key), **definitions}, False) for key in rest)
        for key, tried, is_refused in chain(alone, decisive):
            if (yield from self._is_refused(tried)) is not is_refused:
                continue
            value, any_of_them = part.pop(key), {"anyOf": rest[key], **definitions}
            if key == "oneOf" and "anyOf" not in part and not (yield from self._is_refused(any_of_them)):
                part["anyOf"] = value  # relaxed: any of the options instead of exactly one
            return (key,)
        part.clear()
        return ()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The vocabulary in llguidance's format. Raises GrammarError if tokens cannot be read as byte strings."""
        try:
            size = max(
                self._vocab_size, self._tokenizer.vocab_size
            )  # ids beyond the target's vocabulary are never sampled
            tokens = LLTokenizer(self._tokenizer.backend_json(), n_vocab=size)
            return LLTokenizer(_LiteralTokenizer(self._tokenizer, tokens), eos_token=self._eos_ids)
        except Exception as error:  # llguidance raises several types
            raise GrammarError(f"this model's tokenizer cannot be used with grammars: {error}") from error

    def _path(self, kind: GrammarKind, schema: Any) -> Steps[tuple[str, ...]]:
        """Return the path of the first innermost subschema that cannot be enforced."""
        path: tuple[str, ...] = ()
        if kind != "json_schema" or not isinstance(schema, dict):
            return path
        definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
        parts, tried = _parts(schema), 0
        while tried < _MAX_TRIED and (found := next(parts, None)) is not None:
            tried, (name, inner) = tried + 1, found
            if (yield from self._is_refused({**inner, **definitions})):
                path, parts = (*path, *name), _parts(inner)
        return path

    def _is_refused(self, schema: dict[str, Any]) -> Steps[bool]:
        yield
        try:
            return self._matcher_of("json_schema", schema)[0].is_error()
        except GrammarError:
            return True

    def _matcher_of(self, kind: GrammarKind, value: Any) -> tuple[LLMatcher, int]:
        """Return the matcher of a grammar, and the length of the grammar in Lark syntax. Raises GrammarError."""
        lark = as_lark(kind, value)
        _refuse_harmful(lark)
        return LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0), len(lark)


class _LiteralTokenizer(TokenizerWrapper):
    """Adapter to llguidance's tokenizer interface that encodes the names of special tokens as text.

    llguidance's own tokenizer encodes the literal "<|im_end|>" as the special token of that name, which ends the text;
    and it treats every added token named <...> as special, even those that are text, such as Qwen's <tool_call>.
    """

    def __init__(self, tokenizer: ChatTokenizer, tokens: LLTokenizer) -> None:
        """`tokens`: llguidance's own tokenizer, read for the bytes of each token."""
        beyond = range(tokenizer.vocab_size, tokens.vocab_size)
        self.eos_token_id, self.bos_token_id = 0, None  # placeholder: LLTokenizer gets the end tokens itself
        self.tokens = [tokens.decode_bytes([token]) for token in range(tokens.vocab_size)]
        self.special_token_ids = [*tokenizer.special_ids.values(), *beyond]
        self.is_tokenizer_wrapper = True
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _refuse_harmful(lark: str) -> None:
    """Raise GrammarError for a grammar that could take llguidance seconds or overflow its stack, and for the integer
    -2**63, on which llguidance 1.9 hangs the process."""
    if len(lark) > _MAX_CHARACTERS:
        raise GrammarError(f"it is longer than {_MAX_CHARACTERS} characters")
    if lark.count("\n") + max(schema.count("{") for schema in lark.split("%json")) > _MAX_PARTS:
        raise GrammarError(f"it has more than {_MAX_PARTS} parts")

    for found in _LARGE.findall(lark):
        if float(found) == -(2.0**63):
            raise GrammarError(f"the integer {found} is not supported")


def _without(schema: Schema, key: str) -> Schema:
    return {name: value for name, value in schema.items() if name != key}


def _part_at(schema: Schema, path: Sequence[str]) -> Schema:
    part: Any = schema
    for name in path:
        part = part[int(name)] if isinstance(part, list) else part[name]
    found: Schema = part
    return found


def _parts(schema: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the immediate subschemas with their paths."""
    for key, value in schema.items():
        if isinstance(value, dict) and key in ("properties", "patternProperties", *DEFINITIONS):
            yield from (((key, name), inner) for name, inner in value.items() if isinstance(inner, dict))
        elif isinstance(value, dict):
            yield (key,), value
        elif isinstance(value, list):
            yield from (((key, str(index)), inner) for index, inner in enumerate(value) if isinstance(inner, dict))


def as_lark(kind: GrammarKind, value: Any) -> str:
    """Convert a grammar of any kind to Lark syntax. Raises GrammarError."""
    if kind == "json_schema":
        return f"start: {json_rule(value)}"
    if kind == "regex":
        written: str = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
        return written
    if kind == "choice":
        return "start: " + " | ".join(json.dumps(choice) for choice in value)
    if kind == "lark":
        return str(value)
    if len(value) > _MAX_CHARACTERS or value.count("::=") > _MAX_GBNF_RULES:
        raise GrammarError(f"it is longer than {_MAX_CHARACTERS} characters, or has more than {_MAX_GBNF_RULES} rules")
    try:
        return str(any_to_lark(value))
    except Exception as error:  # llguidance's parser raises several types
        raise GrammarError(f"neither valid Lark nor valid GBNF: {error}") from error


def json_rule(schema: JsonValue) -> str:
    """Build the right-hand side of a Lark rule for a schema. Raises GrammarError if it is not a valid schema."""
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object")
    try:
        supported = translated(schema)
    except OverflowError as error:
        raise GrammarError(str(error)) from error
    except (TypeError, ValueError, AttributeError, RecursionError) as error:  # a keyword has a value of the wrong type
        raise GrammarError(f"this is not a valid JSON schema: {error}") from error
    return f"%json {json.dumps({**supported, 'x-guidance': _JSON_FORM})}"


def _refusal(matcher: LLMatcher) -> str:
    """Return llguidance's error message without position and source excerpt."""
    message = _PLACE.sub("", matcher.get_error().strip())
    return "it is too large" if message.startswith("panic:") else message.partition("\n   1 |")[0].strip()
