"""Text to tokens and back: chat templates, plain encoding, and detokenization one token at a time. Special tokens are
control tokens only where the template writes them; in anything a client wrote they are text."""

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
# Whatever a template does with a client's values (slicing, arithmetic, look-ups) can fail in these ways.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class IncrementalDetokenizer:
    """Turns tokens into text as they come, without ever splitting a character."""

    def __init__(self, backend: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._unshown: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        self._unshown.append(token_id)
        text = self._stream.step(self._backend, token_id)
        if text is None:
            return ""
        self._unshown.clear()
        return text

    def flush(self) -> str:
        """Text of the tokens still held back, with U+FFFD for bytes that never became a character."""
        text = self._backend.decode(self._unshown, skip_special_tokens=self._skip_special_tokens)
        self._unshown.clear()
        return text


class ChatTokenizer:
    """A fast tokenizer and its chat template. Safe to call from several threads: nothing in it changes after start."""

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
        # A second copy, because the switch is a setting of the shared object and not of the call.
        self._literal: Tokenizer = copy.deepcopy(self._parsing)
        self._literal.encode_special_tokens = True
        added = self._parsing.get_added_tokens_decoder()
        self.special_ids: Mapping[str, int] = {
            token.content: token_id for token_id, token in added.items() if token.special
        }
        self._reserved_kwargs = _RESERVED_TEMPLATE_KWARGS | tokenizer.special_tokens_map.keys()

    @property
    def fingerprint(self) -> str:
        """A hash of what each token means."""
        return hashlib.sha256(json.dumps(sorted(self._parsing.get_vocab().items())).encode()).hexdigest()

    @property
    def chat_template(self) -> str | None:
        """The template as the model has it; of several the one for tools."""
        if self._tokenizer.chat_template is None:
            return None
        return str(self._tokenizer.get_chat_template(tools=[{}]))

    @property
    def vocab_size(self) -> int:
        return self._parsing.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a client's text; special tokens in it are text, the ones the tokenizer adds itself are not."""
        return list(self._literal.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return str(self._parsing.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def detokenizer(self, skip_special_tokens: bool) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._parsing, skip_special_tokens=skip_special_tokens)

    def backend_json(self) -> str:
        """The tokenizer as its library writes it, special tokens included."""
        return str(self._parsing.to_str())

    def token_string(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None for an id it does not have."""
        return self._parsing.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also when they are only a part of a character."""
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
        """Parse the template's special tokens, and encode every run of text between them literally."""
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
    """Replaces special tokens in a client's strings by unguessable words, so that rendering cannot revive them. A
    template that trims, splits or looks into content sees all the rest of it."""

    def __init__(self, special_strings: Sequence[str]) -> None:
        self._nonce = secrets.token_hex(12)
        self._specials = sorted(special_strings, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None
        self._find_word = re.compile(self._nonce + r"x(\d+)x")
        self.hid_something = False

    def hide(self, value: JsonValue) -> JsonValue:
        """The same value with every text in it changed."""
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
