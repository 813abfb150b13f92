"""Text to tokens and back: chat templates, plain encoding, and incremental detokenization. The names of special tokens
are control tokens only where the template writes them; in a client's text they are plain text."""

import copy
import hashlib
import inspect
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from pydantic import JsonValue
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from service.errors import InvalidRequest, StartupError

_REPLACEMENT = "\ufffd"
_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_RESERVED_TEMPLATE_KWARGS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {
    "messages",
    "conversations",
}
# The errors of operations that templates apply to a client's values: slicing, arithmetic, look-ups.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class IncrementalDetokenizer:
    """Converts tokens to text one at a time, without splitting a character."""

    def __init__(self, backend: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._unshown: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that a token completes; empty while a character is incomplete."""
        self._unshown.append(token_id)
        text = self._stream.step(self._backend, token_id)
        if text is None:
            return ""
        self._unshown.clear()
        return text

    def flush(self) -> str:
        """The text of tokens still held back, with U+FFFD for bytes of incomplete characters."""
        text = self._backend.decode(self._unshown, skip_special_tokens=self._skip_special_tokens)
        self._unshown.clear()
        return text


class ChatTokenizer:
    """A fast tokenizer and its chat template. Immutable, so that threads may share it."""

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
        # A second copy, because `encode_special_tokens` is a property of the object and not of the call.
        self._literal: Tokenizer = copy.deepcopy(self._parsing)
        self._literal.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self._reserved_kwargs = _RESERVED_TEMPLATE_KWARGS | tokenizer.special_tokens_map.keys()

    @property
    def fingerprint(self) -> str:
        """A hash of the vocabulary."""
        return hashlib.sha256(json.dumps(sorted(self._parsing.get_vocab().items())).encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The model's chat template; of several, the one for tools."""
        if self._tokenizer.chat_template is None:
            return None
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._parsing.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a client's text, in which names of special tokens are plain text. `add_special_tokens`: with those
        that the tokenizer adds itself."""
        return list(self._literal.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of tokens."""
        return str(self._parsing.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool) -> IncrementalDetokenizer:
        """A detokenizer for one sequence."""
        return IncrementalDetokenizer(self._parsing, skip_special_tokens=skip_special_tokens)

    def backend_json(self) -> str:
        """The tokenizer in the JSON form of its library, with special tokens."""
        return str(self._parsing.to_str())

    def token_string(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None: there is no token with this id."""
        return self._parsing.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        text = self.decode([token_id])
        spelling = self.token_string(token_id)
        if _REPLACEMENT not in text or spelling is None:
            return text.encode()
        if match := _BYTE_FALLBACK.fullmatch(spelling):
            return bytes.fromhex(match[1])
        if all(character in _BYTE_OF_CHARACTER for character in spelling):
            return bytes(_BYTE_OF_CHARACTER[character] for character in spelling)
        return text.encode()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, JsonValue]],
        *,
        tools: Sequence[JsonValue] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[int]:
        """Tokens of a conversation in the model's own chat format; `tools` for a template that knows them."""
        for name in chat_template_kwargs or {}:
            if name in self._reserved_kwargs:
                raise InvalidRequest(
                    f"'{name}' cannot be set through chat_template_kwargs.", param=f"chat_template_kwargs.{name}"
                )
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        guard = _SpecialTokenGuard(tuple(self.special_ids))
        # A template's own variables may have any type.
        variables: dict[str, Any] = {name: guard.hide(value) for name, value in (chat_template_kwargs or {}).items()}
        variables["tools"] = [guard.hide(tool) for tool in tools] or None
        conversation: list[Any] = [{key: guard.hide(value) for key, value in message.items()} for message in messages]
        try:
            rendered = self._tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except _TEMPLATE_ERRORS as error:
            message = f"The chat template refused these messages: {error}"
            raise InvalidRequest(message, param="messages") from error
        if not guard.hid_something:
            return list(self._parsing.encode(str(rendered), add_special_tokens=False).ids)
        return self._encode_guarded(str(rendered), guard)

    def _encode_guarded(self, rendered: str, guard: "_SpecialTokenGuard") -> list[int]:
        """Parse the template's special tokens, and encode the text between them as plain text."""
        encoding = self._parsing.encode(rendered, add_special_tokens=False)
        control_ids = frozenset(self.special_ids.values())
        ids: list[int] = []
        run_start = 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in control_ids:
                ids += self.encode(guard.reveal(rendered[run_start:start]))
                ids.append(token_id)
                run_start = end
        return ids + self.encode(guard.reveal(rendered[run_start:]))


class _SpecialTokenGuard:
    """Replaces names of special tokens in a client's strings by random words, so that the rendered prompt does not
    contain them as control tokens. A template sees the rest of the strings unchanged."""

    def __init__(self, special_strings: Sequence[str]) -> None:
        self._nonce = secrets.token_hex(12)
        self._specials = sorted(special_strings, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None
        self._find_word = re.compile(self._nonce + r"x(\d+)x")
        self.hid_something = False

    def hide(self, value: JsonValue) -> JsonValue:
        """The value with the names in all of its strings replaced."""
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {str(self.hide(name)): self.hide(item) for name, item in value.items()}
        if not isinstance(value, str) or self._find is None or self._find.search(value) is None:
            return value
        self.hid_something = True
        return self._find.sub(lambda match: f"{self._nonce}x{self._specials.index(match[0])}x", value)

    def reveal(self, text: str) -> str:
        revealed = self._find_word.sub(lambda match: self._specials[int(match[1])], text)
        if self._nonce in revealed.lower():
            raise InvalidRequest(
                "The messages contain special tokens that this model's chat template cannot keep as text.",
                param="messages",
            )
        return revealed
