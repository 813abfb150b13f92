"""The text of one sequence as it grows: detokenization, stop strings, and what may be shown already.

Knows neither tokens' meaning nor why a generation ends: it only says that a stop string is complete.
"""

from service.tokenizer import IncrementalDetokenizer


class TextStream:
    """Text that is fed token by token and taken in pieces which never begin a stop string unnoticed.

    The stop string that is complete first wins (the longest, when several end at the same character), which makes the
    result independent of how the text is cut into tokens.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, *, stop: tuple[str, ...], include_stop: bool, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pending = ""  # not yet taken; a stop string that is still possible begins in here
        self._searched = 0  # characters of `_pending` in which no stop string may end any more
        self._stopped = False

    def push(self, token_id: int) -> str | None:
        """Feed one token; the stop string that is now complete, if one is. Nothing may be pushed after that."""
        assert not self._stopped, "pushed a token after a stop string"
        self._num_tokens += 1
        return self._append(self._detokenizer.push(token_id))

    def take(self) -> str:
        """Text that may be shown now."""
        shown = len(self._pending) if self._stopped else self._first_possible_stop()
        return self._cut(shown)

    def finish(self) -> str:
        """All the rest; to be called once, after the last token."""
        if not self._stopped:
            self._append(self._detokenizer.flush())
        return self._cut(len(self._pending))

    def _append(self, text: str) -> str | None:
        self._pending += text
        if self._num_tokens > self._min_tokens and (match := self._first_stop()) is not None:
            start, stop = match
            self._pending = self._pending[: start + len(stop) if self._include_stop else start]
            self._stopped = True
            return stop
        self._searched = len(self._pending)
        return None

    def _first_stop(self) -> tuple[int, str] | None:
        """Where the earliest stop string begins, and which one it is."""
        found: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._pending.find(stop, max(0, self._searched + 1 - len(stop)))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return found and found[1:]

    def _first_possible_stop(self) -> int:
        """Where text begins that could still become a stop string."""
        for start in range(len(self._pending)):
            if any(_continues(stop, self._pending, start) for stop in self._stop):
                return start
        return len(self._pending)

    def _cut(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        self._searched = max(0, self._searched - length)
        return text


def _continues(stop: str, text: str, start: int) -> bool:
    """Whether `text` from `start` on is a proper beginning of `stop`."""
    return len(text) - start < len(stop) and stop.startswith(text[start:])
