"""Tokenizers as GGUF files have them: byte pairs with the name of a pre-tokenizer, and SentencePiece with scores."""

import json
import random
import re
from collections.abc import Iterable

from gguf import TokenType
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tests.conformance.gguf_writer import Value
from tests.tiny_models import EOS_ID, VOCAB_SIZE, tiny_tokenizer

_KINDS = "llama-bpe qwen2 smollm gpt-2 default starcoder refact olmo dbrx stablelm2 chatglm-bpe glm4 tekken gpt-4o"
PRE_TOKENIZERS = tuple(_KINDS.split())
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
DEFINED = ("<think>", "</think>")
_WORDS = (
    "the The THE hello Hello world WORLD I'm we're They'LL don't it's naïve café Straße Ærø İstanbul e\u0301clair "
    "1 12 123 1234 12345 1234567 3.14159 1,000,000 0x1F ½ ² ٣٤ १२३ Ⅷ 你好 世界 日本語 こんにちは 안녕하세요 привет МИР "
    "γειά שלום مرحبا ไทย हिन्दी 👍 👩\u200d👩\u200d👧 🇩🇪 ✊🏽 foo_bar camelCase HTTPServer __init__ x+=1 a->b {} () [] "
    ";;; ... ?! -- --- === /* */ // \\ http://a.b/c?d=e#f user@example.com $5 50% #tag @name ` ^ | & <b> «quoted» “x” "
    "<|im_start|> <|im_end|> <|endoftext|> <s> </s> <unk> <think> </think> [INST] <0x0A> ▁ \u00ad \ufeff \x00 \x7f"
)
_BLANKS = "|| | | |  |   |\t|\n|\n\n|\r\n| \n|\n |    |\u00a0|\u3000|\u2009"


def texts(count: int = 200) -> list[str]:
    """Return texts of digits, blanks, accents, emoji, many scripts and names of control tokens."""
    draw, words, blanks = random.Random(0), _WORDS.split(" "), _BLANKS.split("|")

    def text() -> str:
        return "".join(draw.choice(blanks) + draw.choice(words) for _ in range(draw.randrange(1, 8)))

    return [text() + draw.choice(blanks) for _ in range(count)]


def _corpus() -> list[str]:
    """Texts without names of control tokens, which are no merges, and NUL, with which llama.cpp ends a piece."""
    return [re.sub(r"<[^<>\s]*>|\0", "", text) for text in texts(400)]


def byte_pairs(pre: str, size: int = 1200) -> dict[str, Value]:
    """Keys of a byte-level BPE whose merges go over the borders of words, so that the pre-tokenizer decides."""
    backend, alphabet = Tokenizer(BPE()), sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.train_from_iterator(_corpus(), BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    added = _typed(CONTROLS, TokenType.CONTROL) + _typed(DEFINED, TokenType.USER_DEFINED)
    learnt = _typed(_in_order(backend), TokenType.NORMAL)
    return _byte_pair_keys(backend, pre, learnt + added, eos=len(learnt))


def tiny_byte_pairs() -> dict[str, Value]:
    """Keys of the tokenizer of tiny models."""
    tokenizer = tiny_tokenizer()
    names, added = _in_order(tokenizer.backend_tokenizer), len(tokenizer.added_tokens_decoder)
    tokens = _typed(names[:-added], TokenType.NORMAL) + _typed(names[-added:], TokenType.CONTROL)
    return _byte_pair_keys(tokenizer.backend_tokenizer, "gpt-2", tokens, eos=EOS_ID)


def sentence_pieces(size: int = VOCAB_SIZE, *, prefix: bool = True, merged: bool = False) -> dict[str, Value]:
    """Keys of a SentencePiece BPE of so many pieces with those of bytes; `prefix`: a blank begins each text; `merged`:
    with a list of merges, as Gemma 4 has it, instead of scores."""
    backend, room = Tokenizer(BPE()), size - 259 - len(DEFINED)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.train_from_iterator(_corpus(), BpeTrainer(vocab_size=room, limit_alphabet=room // 2, show_progress=False))
    pieces = sorted(_in_order(backend), key=lambda piece: len(piece) == 1)  # those of one letter come last
    tokens = [("<unk>", TokenType.UNKNOWN), *_typed(("<s>", "</s>"), TokenType.CONTROL)]
    tokens += _typed((f"<0x{byte:02X}>" for byte in range(256)), TokenType.BYTE)
    tokens += _typed(DEFINED, TokenType.USER_DEFINED) + _typed(pieces, TokenType.NORMAL)
    tokens += _typed((f"[PAD{number}]" for number in range(size - len(tokens))), TokenType.UNUSED)
    scores = [0.0] * 259 + [-1000.0] * len(DEFINED) + [-float(rank) for rank in range(room)]
    more = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    ordered: dict[str, Value] = {"merges": _merges(backend)} if merged else {"scores": scores}
    return _keys("gemma4" if merged else "llama", "default", tokens, add_space_prefix=prefix, **more, **ordered)


def _byte_pair_keys(backend: Tokenizer, pre: str, tokens: list[tuple[str, TokenType]], *, eos: int) -> dict[str, Value]:
    return _keys("gpt2", pre, tokens, merges=_merges(backend), eos_token_id=eos, add_bos_token=False)


def _merges(backend: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def _keys(model: str, pre: str, tokens: list[tuple[str, TokenType]], **more: Value) -> dict[str, Value]:
    names, kinds = [name for name, _ in tokens], [int(kind) for _, kind in tokens]
    keys: dict[str, Value] = {"model": model, "pre": pre, "tokens": names, "token_type": kinds, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def _in_order(backend: Tokenizer) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=vocabulary.__getitem__)


def _typed(names: Iterable[str], kind: TokenType) -> list[tuple[str, TokenType]]:
    return [(name, kind) for name in names]
