"""A compiler of grammars for a small tokenizer, and whether a text matches a grammar."""

from collections.abc import Sequence

from service.text.grammars import Grammar, GrammarCompiler
from service.text.tokenizer import ChatTokenizer
from tests.tiny_models import tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
EOS = TOKENIZER.special_ids["<|end|>"]
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, frozenset({EOS}))


def matches(grammar: Grammar, text: str | Sequence[int]) -> bool:
    """Whether all of the text, or of its tokens, is one of the grammar's."""
    tokens = TOKENIZER.encode(text) if isinstance(text, str) else text
    return bool(grammar._matcher.deep_copy().consume_tokens([*tokens, EOS]))
