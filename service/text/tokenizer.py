"""Tokenizer: chat templates, plain encoding, and incremental detokenization. Names of special tokens are encoded as
control tokens only where the chat template writes them; in text of clients they stay plain text."""

import codecs
import copy
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from typing import Any

import jinja2
from pydantic import JsonValue
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.chat_template_utils import render_jinja_template

from service.errors import InvalidRequest, StartupError
from service.text.chat_template import Traits, Turn, probe
from service.text.special_tokens import SpecialTokenGuard, control_tokens, finder

_REPLACEMENT = "\ufffd"
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
_CONTEXT = 4  # number of preceding tokens that determine how the next one is decoded
_LONGEST_WINDOW = 12  # window length at which a detokenizer drops all but the last tokens
_ADDING = (
    ("ByteLevel",),
    ("Metaspace",),
    ("Replace", "ByteFallback", "Fuse"),
    ("Replace", "ByteFallback", "Fuse", "Strip"),
)
"""Decoders that concatenate the texts of tokens, except for a prefix that they strip."""
_RESERVED_TEMPLATE_KWARGS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages",
    "conversations",
}
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
"""Errors that template operations on client values can raise: slicing, arithmetic, look-ups."""

_NO_TEMPLATE = Traits(calls="text", results="user", arguments="text")


class IncrementalDetokenizer:
    """Converts tokens to text incrementally. The pieces add up to the decoded prompt and answer without the decoded
    prompt.

    Text that later tokens may change is held back: the last character while it is incomplete, and a run of tokens for
    single bytes, all of which become U+FFFD if the run is not valid in the end.
    """

    def __init__(self, tokenizer: "ChatTokenizer", *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode
        self._texts = tokenizer.texts
        self._hidden = tokenizer.skipped_ids if skip_special_tokens else frozenset[int]()
        self._window = self._end_of(prompt)  # context of the next token, and tokens that are held back
        self._shown = self._decode(self._window)  # prefix of the window's text that was sent or belongs to the prompt
        self._run: list[int] = []  # trailing byte tokens of the answer
        self._is_open = self._may_change(self._shown)  # whether `_shown` is valid and the next token may change its end

    @property
    def is_at_start(self) -> bool:
        """Whether neither prompt nor answer has a token yet: some tokenizers drop the space before the first word."""
        return not self._window

    @property
    def num_held(self) -> int:
        """Number of byte tokens that are held back."""
        return len(self._run)

    @property
    def held(self) -> str:
        """Text that is held back, with U+FFFD for incomplete characters. At the end, append it to the output."""
        return _without(self._shown, self._decode(self._window)) if self._is_open else ""

    def num_held_before(self, token_id: int) -> int:
        """Return the number of held-back characters before the character that the next token begins or continues."""
        bytes_of = self._tokenizer.token_bytes
        held, first = self.held, b"" if token_id in self._hidden else bytes_of(token_id)[:1]
        if held.endswith(_REPLACEMENT) and (not first or b"\x80" <= first < b"\xc0"):
            with suppress(UnicodeDecodeError):  # invalid bytes are one U+FFFD each
                return len(codecs.utf_8_decode(b"".join(map(bytes_of, self._run)))[0])
        return len(held)

    def push(self, *token_ids: int) -> str:
        """Append tokens and return the text they complete; empty while a character is incomplete."""
        return "".join(self._add(token_id) for token_id in token_ids if token_id not in self._hidden)

    def _add(self, token_id: int) -> str:
        """Append one token and return the text it completes."""
        if not self._window and not self._tokenizer.token_bytes(token_id):
            return ""  # the id is not in the vocabulary
        if self._window and not self._is_open:
            if text := self._texts[token_id]:
                self._window.append(token_id)
                if len(self._window) > _LONGEST_WINDOW:
                    del self._window[:-_CONTEXT]
                return text
            self._shown = self._decode(self._window)
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            self._run.append(token_id)
            self._is_open = True
            return ""
        self._run.clear()
        text = self._decode(self._window)
        self._is_open = self._may_change(text)
        return self._show(text[:-1] if self._is_open else text)

    def _may_change(self, text: str) -> bool:
        """Whether the window's text ends in an incomplete character or in byte tokens."""
        return text.endswith(_REPLACEMENT) or not self._tokenizer.byte_ids.isdisjoint(self._window[-1:])

    def _show(self, text: str) -> str:
        """Return the new part of the window's text, and drop tokens that are no longer needed as context."""
        if self._shown.startswith(text):
            return ""
        new, self._shown = _without(self._shown, text), text
        kept = self._window[-_CONTEXT:]
        if len(self._window) > _LONGEST_WINDOW and (text := self._decode(kept)):
            self._window, self._shown = kept, text.removesuffix(_REPLACEMENT)
        return new

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt: trailing byte tokens, and some whole tokens before them."""
        end, num_whole = list[int](), 0
        for token_id in reversed(prompt):
            if token_id in self._hidden or not self._tokenizer.token_bytes(token_id):
                continue
            end.append(token_id)
            num_whole += token_id not in self._tokenizer.byte_ids
            if num_whole == _CONTEXT:
                break
        return end[::-1]


def _without(before: str, text: str) -> str:
    """Return the part of a text after its common prefix with `before`."""
    if text.startswith(before):
        return text[len(before) :]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False))
    return text[sum(1 for _ in same) :]


class _Texts(dict[int, str]):
    """Cache of the text that each token adds, filled on demand; empty for tokens whose text depends on their
    neighbours."""

    def __init__(self, tokenizer: "ChatTokenizer", backend: Tokenizer) -> None:
        self._tokenizer = tokenizer
        alone = Tokenizer(BPE())
        alone.decoder = backend.decoder
        decoder = json.loads(alone.to_str())["decoder"] or {}
        steps = decoder.get("decoders", [decoder])
        kinds = tuple(step.get("type") for step in steps)
        self._adds_up = kinds in _ADDING and not any(step.get("stop") for step in steps)

    def __missing__(self, token_id: int) -> str:
        text = self._tokenizer.token_text(token_id)
        depends = _REPLACEMENT in text or token_id in self._tokenizer.byte_ids
        self[token_id] = "" if depends or not self._adds_up else text
        return self[token_id]


class ChatTokenizer:
    """Fast tokenizer of a model with its chat template. Immutable and thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise StartupError(
                f"the tokenizer of this model ({type(tokenizer).__name__}) has no fast form; "
                "convert it to a tokenizer.json or choose another model"
            )
        self._tokenizer = tokenizer
        self._parsing: Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self._parsing.encode_special_tokens = False
        # A second copy, because `encode_special_tokens` is set per object, not per call.
        self._literal: Tokenizer = copy.deepcopy(self._parsing)
        self._literal.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids: Mapping[str, int] = control_tokens(added)
        self._literal.add_special_tokens(list(self.special_ids))  # includes control tokens that the files do not mark
        self.skipped_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.byte_ids = self._find_bytes()
        self.texts = _Texts(self, self._parsing)
        self._find_special = finder(self.special_ids)
        self._reserved_kwargs = _RESERVED_TEMPLATE_KWARGS | tokenizer.special_tokens_map.keys()
        template = self.chat_template
        self._traits = (_NO_TEMPLATE, _NO_TEMPLATE) if template is None else probe(self._tried, template)

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary."""
        return hashlib.sha256(json.dumps(sorted(self._parsing.get_vocab().items())).encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; if there are several, the one for tools."""
        if self._tokenizer.chat_template is None:
            return None
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    def traits(self, *, with_tools: bool) -> Traits:
        """Return the traits of the chat template, for conversations with tools or without."""
        return self._traits[with_tools]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added tokens."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_bytes(self) -> int:
        """Upper bound for the bytes of text that one token can stand for."""
        return max(len(token.encode()) for token in self._parsing.get_vocab(with_added_tokens=True))

    def refuse_longer(self, text: str, most_tokens: int | None, param: str) -> None:
        """Raise InvalidRequest for a text that cannot fit `most_tokens`. Encoding it could take seconds."""
        if most_tokens is not None and len(text) > most_tokens * self.longest_token_bytes:
            message = f"This model's maximum context length is {most_tokens} tokens. Your {param} has {len(text)} "
            message += f"characters, which cannot fit. Please reduce the length of the {param}."
            raise InvalidRequest(message, param=param, code="context_length_exceeded")

    def encode(self, text: str, *, add_special_tokens: bool = False, control: bool = False) -> list[int]:
        """Encode text of a client. Names of special tokens are plain text unless `control`. `add_special_tokens`: add
        the tokenizer's own, but no second BOS."""
        bos = self._tokenizer.bos_token
        if control and bos and text.startswith(str(bos)):
            add_special_tokens = False
        backend = self._parsing if control else self._literal
        return _ids(backend, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Decode tokens to text."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> IncrementalDetokenizer:
        """Create a detokenizer for one sequence that continues a prompt."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens, prompt=prompt)

    def backend_json(self) -> str:
        """Return the content of tokenizer.json, with special tokens."""
        return str(self._parsing.to_str())

    def token_string(self, token_id: int) -> str | None:
        """Return the spelling of a token in the vocabulary, or None if the id is unused."""
        return self._parsing.id_to_token(token_id)

    def token_bytes(self, token_id: int, *, at_start: bool = False) -> bytes:
        """Return the bytes of a token, possibly a part of a character. `at_start`: at the start of a text, where some
        tokenizers drop a space."""
        alone, spelling = self.decode([token_id]), self.token_string(token_id) or ""
        if at_start and _REPLACEMENT not in alone:
            return alone.encode()
        if token_id in self.byte_ids:
            return bytes.fromhex(spelling[3:5])
        if _REPLACEMENT in alone and all(character in _BYTE_OF_CHARACTER for character in spelling):
            return bytes(_BYTE_OF_CHARACTER[character] for character in spelling)
        return self.decode([token_id, token_id])[len(alone) :].encode()

    def token_text(self, token_id: int, *, at_start: bool = False) -> str:
        """Return the text of a token, with U+FFFD for parts of characters."""
        return self.token_bytes(token_id, at_start=at_start).decode(errors="replace")

    def _find_bytes(self) -> frozenset[int]:
        """Return the ids of the tokens <0x00> to <0xFF> if the vocabulary uses them as byte fallback, not as text."""
        found = {name: self._parsing.token_to_id(name) for name in (f"<0x{byte:02X}>" for byte in range(256))}
        return frozenset(
            token_id for name, token_id in found.items() if token_id is not None and self.decode([token_id]) != name
        )

    def unknown_ids(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` that have no token. The model must never sample them."""
        return [token_id for token_id in range(vocab_size) if self.token_string(token_id) is None]

    def refuse_narrow_vocabulary(self, vocab_size: int) -> None:
        """Raise StartupError if the model's embedding has no row for one of the tokens."""
        # Control tokens may exceed it: transformers adds its own, and a prompt that contains one is refused (400).
        vocab = self._parsing.get_vocab(with_added_tokens=True)
        special = self.special_ids
        beyond = sorted((index, name) for name, index in vocab.items() if index >= vocab_size and name not in special)
        if beyond:
            first, name = beyond[0]
            raise StartupError(
                f"the tokenizer has {len(beyond)} tokens beyond the model's vocabulary of {vocab_size}, "
                f"the first {name!r} ({first}); remove them from tokenizer.json, or resize the model's embeddings"
            )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        tools: Sequence[JsonValue] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
        most_tokens: int | None = None,
    ) -> list[int]:
        """Render a conversation with the model's chat template and encode it. Messages are first adapted to what the
        template supports. A prompt that cannot fit `most_tokens` is refused before encoding. Raises InvalidRequest."""
        for name in chat_template_kwargs or {}:
            if name in self._reserved_kwargs:
                raise InvalidRequest(
                    f"'{name}' cannot be set through chat_template_kwargs.", param=f"chat_template_kwargs.{name}"
                )
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        guard = SpecialTokenGuard(self._find_special)
        turns, listed = self.traits(with_tools=bool(tools)).in_its_terms(messages, tools)
        try:
            rendered = self._rendered(
                [{key: guard.hide(value) for key, value in turn.items()} for turn in turns],
                [guard.hide(tool) for tool in listed],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{name: guard.hide(value) for name, value in (chat_template_kwargs or {}).items()},
            )
        except TEMPLATE_ERRORS as error:
            message = f"The chat template refused these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        self.refuse_longer(rendered, most_tokens, "messages")
        if not guard.hid_something:
            return _ids(self._parsing, rendered)
        return self._encode_guarded(rendered, guard)

    @cached_property
    def _opening(self) -> int | None:
        """First token of the generation prompt; None if the template has none, or refuses the shortest conversation."""
        turns = [{"role": "user", "content": "a"}]
        try:
            texts = [self._rendered(turns, [], add_generation_prompt=adds) for adds in (True, False)]
        except TEMPLATE_ERRORS:
            return None
        prompt = texts[0].removeprefix(texts[1])
        return _ids(self._parsing, prompt)[0] if prompt and texts[0].startswith(texts[1]) else None

    def messages_end(self, ids: Sequence[int]) -> int | None:
        """Number of leading tokens of a rendered conversation before its generation prompt, as far as its first token
        tells: None if the template has no generation prompt."""
        opening = self._opening
        places = range(len(ids) - 1, -1, -1) if opening is not None else ()
        return next((place for place in places if ids[place] == opening), None)

    def _rendered(self, turns: Sequence[Turn], tools: Sequence[JsonValue], **variables: Any) -> str:
        """Render a conversation to text. Unlike in `apply_chat_template`, contents that are None reach the template."""
        conversation: list[Any] = list(turns)
        listed: list[Any] | None = list(tools) or None
        variables = {**self._tokenizer.special_tokens_map, **variables}
        template = self._tokenizer.get_chat_template(tools=listed)
        rendered: Any = render_jinja_template([conversation], listed, chat_template=template, **variables)
        # A lone surrogate, which JSON arguments may contain, cannot be encoded.
        return str(rendered[0][0]).encode(errors="backslashreplace").decode()

    def _tried(self, turns: Sequence[Turn], tools: Sequence[JsonValue]) -> str:
        """Render a conversation to text. Returns an empty text if the template refuses it."""
        try:
            return self._rendered(turns, tools, add_generation_prompt=turns[-1]["role"] != "assistant")
        except TEMPLATE_ERRORS:
            return ""

    def _encode_guarded(self, rendered: str, guard: SpecialTokenGuard) -> list[int]:
        """Encode the special tokens of the template as such, and the text between them as plain text."""
        (encoding,) = self._parsing.encode_batch([rendered], add_special_tokens=False)
        control_ids = frozenset(self.special_ids.values())
        ids: list[int] = []
        run_start = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in control_ids:
                ids += self.encode(guard.reveal(rendered[run_start:start]))
                ids.append(token_id)
                run_start = end
        return ids + self.encode(guard.reveal(rendered[run_start:]))


def _ids(backend: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Encode a text as a batch of one, which releases the interpreter lock, unlike `encode`."""
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)
