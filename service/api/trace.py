"""What single steps did, for streams that ask with `speculation: {"trace": true}`: the text of each token, how many of
them were guessed, and the draft tree they were taken from.

An extension of ours: the key `speculation` in a chunk's choice. Nothing else in the chunk changes.
"""

from pydantic import JsonValue

from service.engine.requests import SequenceOutput, StepTree
from service.tokenizer import ChatTokenizer, IncrementalDetokenizer

_DIGITS = 4


def is_traced(output: SequenceOutput) -> bool:
    return output.tree is not None


class Trace:
    """Words the steps of each choice in turn."""

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._detokenizers: dict[int, IncrementalDetokenizer] = {}

    def of(self, choice: int, output: SequenceOutput) -> dict[str, JsonValue]:
        """One step. A token that stopped the answer may be the last of an accepted path."""
        assert output.tree is not None, "nobody asked for this"
        return {
            "accepted": min(len(output.tree.path), len(output.token_ids)),
            "drafted": len(output.tree.tokens),
            "texts": list[JsonValue](self._texts(choice, output)),
            "tree": self._drawn(output.tree),
        }

    def _texts(self, choice: int, output: SequenceOutput) -> list[str]:
        """A character that several tokens share belongs to the last of them."""
        if choice not in self._detokenizers:
            self._detokenizers[choice] = self._tokenizer.detokenizer(self._skip_special_tokens)
        detokenizer = self._detokenizers[choice]
        texts = [detokenizer.push(token) for token in output.token_ids]
        if output.finish_reason is not None and texts:
            texts[-1] += detokenizer.flush()
        return texts

    def _drawn(self, tree: StepTree) -> dict[str, JsonValue]:
        return {
            "texts": [self._tokenizer.decode([token]) for token in tree.tokens],
            "parents": list[JsonValue](tree.parents),
            "survival": [round(survival, _DIGITS) for survival in tree.survival],
            "path": list[JsonValue](tree.path),
        }
