"""Special tokens: find the added tokens that are never text, and keep their names in client text from becoming
tokens."""

import re
import secrets
from collections.abc import Collection, Mapping
from itertools import groupby

from pydantic import JsonValue
from tokenizers import AddedToken

from service.errors import InvalidRequest

_CONTROL_NAME = re.compile(r"<\|[^<>|]+\|>|<\uff5c[^<>\uff5c]+\uff5c>|<(?:start|end)_of_turn>")


def control_tokens(added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Return the ids, by name, of the added tokens that are never text: tokens marked as special, and tokens that look
    like control tokens, which some model families do not mark."""
    return {
        token.content: token_id
        for token_id, token in added.items()
        if token.special or _CONTROL_NAME.fullmatch(token.content)
    }


def finder(names: Collection[str]) -> re.Pattern[str] | None:
    """Return a regular expression that finds the longest of these names in a text, or None without names."""
    return re.compile(_pattern(sorted(names))) if names else None


def _pattern(names: list[str]) -> str:
    """Build a regular expression for sorted names, in the form of a prefix tree: some tokenizers have thousands of
    names."""
    by_first = [
        re.escape(first) + _pattern([name[1:] for name in some]) if first else ""
        for first, some in groupby(names, key=lambda name: name[:1])
    ]
    if len(by_first) == 1:
        return by_first[0]
    return f"(?:{'|'.join(sorted(by_first, key=bool, reverse=True))})"


class SpecialTokenGuard:
    """Replaces names of special tokens in client strings by random words before rendering, so that they cannot become
    control tokens of the prompt. The rest of the strings is unchanged."""

    def __init__(self, find: re.Pattern[str] | None) -> None:
        """`find`: finds the names (`finder`)."""
        self._nonce = secrets.token_hex(12)
        self._find = find
        self._find_word = re.compile(self._nonce + r"x((?:[0-9a-f]{2})+)x")
        self.hid_something = False

    def hide(self, value: JsonValue) -> JsonValue:
        """Replace the names in all strings of a JSON value."""
        if isinstance(value, list):
            return [self.hide(item) for item in value]
        if isinstance(value, dict):
            return {str(self.hide(name)): self.hide(item) for name, item in value.items()}
        if not isinstance(value, str) or self._find is None or self._find.search(value) is None:
            return value
        self.hid_something = True
        return self._find.sub(lambda match: f"{self._nonce}x{match[0].encode().hex()}x", value)

    def reveal(self, text: str) -> str:
        """Restore the names in rendered text. Raises InvalidRequest if the template changed a replacement word."""
        revealed = self._find_word.sub(lambda match: bytes.fromhex(match[1]).decode(errors="replace"), text)
        if self._nonce in revealed.lower():
            raise InvalidRequest(
                "The messages contain special tokens that this model's chat template cannot keep as text.",
                param="messages",
            )
        return revealed
