"""Special tokens: which added tokens are never text, and how their names in a client's text stay text."""

import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import groupby

from pydantic import JsonValue
from tokenizers import AddedToken

from service.errors import InvalidRequest

_CONTROL_NAME = re.compile(r"<\|[^<>|]+\|>|<\uff5c[^<>\uff5c]+\uff5c>|<(?:start|end)_of_turn>")


def control_tokens(added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Ids, by name, of the added tokens that are never text: special ones, and those with the form of a control token,
    which some families do not mark as special."""
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or _CONTROL_NAME.fullmatch(token.content)
    }


class SpecialNames:
    """The names of special tokens, by number, and an expression that finds the longest of them in a text."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.find = re.compile(_pattern(sorted(self.names))) if self.names else None


def _pattern(names: list[str]) -> str:
    """An expression of sorted names that tries only those that agree with the text so far: some have thousands."""
    by_first = [
        re.escape(first) + _pattern([name[1:] for name in some]) if first else ""
        for first, some in groupby(names, key=lambda name: name[:1])
    ]
    if len(by_first) == 1:
        return by_first[0]
    return f"(?:{'|'.join(sorted(by_first, key=bool, reverse=True))})"


class SpecialTokenGuard:
    """Replaces names of special tokens in a client's strings by random words, so that the rendered prompt does not
    contain them as control tokens. A template sees the rest of the strings unchanged."""

    def __init__(self, special: SpecialNames) -> None:
        self._nonce = secrets.token_hex(12)
        self._special = special
        self._find_word = re.compile(self._nonce + r"x(\d+)x")
        self.hid_something = False

    def hide(self, value: JsonValue) -> JsonValue:
        """The value with the names in all of its strings replaced."""
        find = self._special.find
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {str(self.hide(name)): self.hide(item) for name, item in value.items()}
        if not isinstance(value, str) or find is None or find.search(value) is None:
            return value
        self.hid_something = True
        return find.sub(lambda match: f"{self._nonce}x{self._special.numbers[match[0]]}x", value)

    def reveal(self, text: str) -> str:
        """The text with the names in place of their words. Raises InvalidRequest where the template changed a word."""
        revealed = self._find_word.sub(lambda match: self._special.names[int(match[1])], text)
        if self._nonce in revealed.lower():
            raise InvalidRequest(
                "The messages contain special tokens that this model's chat template cannot keep as text.",
                param="messages",
            )
        return revealed
