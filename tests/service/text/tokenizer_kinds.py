"""Small tokenizers of each kind that checkpoints have, special tokens included."""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast

from service.text.tokenizer import ChatTokenizer
from tests.service.text.tiny_tokenizer import tiny_tokenizer

_SPECIALS = ("<unk>", "<s>", "</s>")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_WORDS = ("▁", *"abcdefgh", "▁a", "▁b", "▁▁", "▁▁▁", "ab", "▁ab", "é", "日", "\n", "\ufffd", "<0x", "▁<0x")


def _served(backend: Tokenizer) -> ChatTokenizer:
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in _SPECIALS])
    backend.add_tokens([AddedToken("  x", normalized=False), AddedToken("<tool>", normalized=False)])
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def _sentencepiece(*, prefix: bool) -> ChatTokenizer:
    """As Llama 2 and Mistral have it; without `prefix` as Gemma has it."""
    names = (*_SPECIALS, *_BYTES, *_WORDS)
    merges = [("▁", "a"), ("▁", "b"), ("▁", "▁"), ("▁", "▁▁"), ("a", "b"), ("▁", "ab")]
    vocab = {name: place for place, name in enumerate(names)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    before = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return _served(backend)


def _unigram(decoder: decoders.Decoder, *, scheme: str, has_bytes: bool) -> ChatTokenizer:
    names = (*_SPECIALS, *(_BYTES if has_bytes else ()), *_WORDS)
    backend = Tokenizer(Unigram([(name, -float(place)) for place, name in enumerate(names)], 0, has_bytes))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    backend.decoder = decoder
    return _served(backend)


KINDS: Mapping[str, ChatTokenizer] = {
    "byte-level": ChatTokenizer(tiny_tokenizer()),
    "sentencepiece": _sentencepiece(prefix=True),
    "sentencepiece without prefix": _sentencepiece(prefix=False),
    "unigram": _unigram(decoders.Metaspace("▁", "always"), scheme="always", has_bytes=False),
    "unigram without prefix": _unigram(decoders.Metaspace("▁", "never"), scheme="never", has_bytes=False),
    "unigram with bytes": _unigram(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", "always")]), scheme="always", has_bytes=True
    ),
}


def ids_of(tokenizer: ChatTokenizer, names: Sequence[str]) -> list[int]:
    """The ids of tokens by their spelling."""
    vocab = tokenizer._parsing.get_vocab()
    return [vocab[name] for name in names]
