"""Builds a tokenizer from the metadata of a GGUF file.

Instead of a tokenizer.json, a file names the kind of vocabulary (`tokenizer.ggml.model`) and, for byte-level BPE, a
pre-tokenizer (`tokenizer.ggml.pre`), as defined by llama.cpp. Unknown names are refused, because with another
pre-tokenizer the tokens would differ from those in training.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from service.errors import StartupError

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # token types in GGUF
_TEXT = (0, _NORMAL, _USER_DEFINED, _UNUSED)  # token types that SentencePiece merges from text
_BLANK = "▁"
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token"}
"""Names in transformers of the special tokens that a file gives as `NAME_token_id`. The padding token is not among
them, because it may be plain text."""
_ALWAYS_CONTROL = re.compile(
    r"<\|(?:eot_id|eom_id|im_end|end|endoftext|fim_prefix|fim_suffix|fim_middle)\|>"
    "|<(?:start_of_turn|end_of_turn|EOT|fim[-_]prefix|fim[-_]suffix|fim[-_]middle)>"
)
"""Control tokens that some conversions mark as normal."""
_PHI3 = ("phi-3", "phi3")
_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3 tokens that strip no white space

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LIKE_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_UPPER, _LOWER = r"(?:(?![a-z])\p{L})", r"(?:(?![A-Z])\p{L})"  # letters outside of ASCII match both
_SYLLABLES = r"(?:(?!\s)[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff])+"


def _by_case(ending: str, digits: str) -> str:
    """Build the regular expression of a pre-tokenizer that splits words between lower and upper case. `ending`: pattern
    of optional word endings; `digits`: pattern of a group of digits."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


_CUTS: Mapping[tuple[str, ...], str] = {
    ("[\\p{P}\\$\\+<=>\\^~\\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (_WORDS,): "gpt-2 phi-2 mpt olmo jais roberta-bpe gigachat exaone4 trillion granite-docling mellum a.x-4.0",
    (r"\p{N}", _WORDS): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (_LIKE_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe "
    "chatglm-bpe glm4 glm5",
    (_LIKE_LLAMA3.replace("{1,3}", ""),): "qwen2 stablelm2 deepseek-r1-qwen megrez kormo f2llmv2 bailingmoe grok-2",
    (_by_case("", r"\p{N}"),): "tekken",
    (_by_case(f"(?:{_ENDINGS})?", r"\p{N}{1,3}"),): "gpt-4o llama4 kanana2 minimax-m2",
    ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _SYLLABLES, r"\p{N}"): "deepseek-coder",
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    ): "deepseek-v3 hunyuan-dense joyai-llm",
}
"""Pre-tokenizers: the regular expressions applied in order, with the names in `tokenizer.ggml.pre` that select them."""
_CUT_OF = {name: cuts for cuts, names in _CUTS.items() for name in names.split()}
_BEGINS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Pre-tokenizers of models that add BOS by default."""
_WHOLE_WORDS = (*_BEGINS, "glm4", "glm5")
"""Pre-tokenizers of models in which a word that is a token is never split, regardless of merges."""

T = TypeVar("T")


class _Tokens(NamedTuple):
    """A file's vocabulary, by token id, and its special tokens."""

    names: list[str]
    types: list[int]
    named: dict[str, str]  # special tokens by their names in transformers
    begins: bool  # whether BOS is added by default
    special: frozenset[str]  # tokens that are control tokens whatever their types are


def tokenizer_of(fields: Mapping[str, object]) -> PreTrainedTokenizerFast:
    """Build the tokenizer from a file's metadata. Raises StartupError for unknown kinds and inconsistent lists."""
    kind = fields.get(_KEY + "model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise _refused("model", f"it is {kind!r}; adaptree reads 'gpt2' (byte-level BPE), 'llama' and 'gemma4'")
    tokens = _tokens(fields, kind)
    try:
        backend = _byte_level(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens)
    except StartupError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise _refused("merges", f"they do not fit the tokens: {error}") from error
    backend.add_tokens(_added(fields, tokens))
    backend.post_processor = _around(fields, tokens, backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **tokens.named)
    tokenizer.chat_template = _templates(fields)
    return tokenizer


def _tokens(fields: Mapping[str, object], model: object) -> _Tokens:
    names = [name or f"[EMPTY_{index}]" for index, name in enumerate(_list(fields, "tokens", str))]
    twice = len(names) - len(set(names))
    if twice:
        ((name, _),) = Counter(names).most_common(1)
        raise _refused("tokens", f"{name!r} occurs twice ({twice} duplicates in all)")
    types = _list(fields, "token_type", int, len(names)) if _KEY + "token_type" in fields else [_NORMAL] * len(names)
    usual = {"bos": 1, "eos": 2, "unknown": 0} if model == "llama" else {}
    ids: dict[str, object] = {name: at for name, at in usual.items() if types[at : at + 1] in ([_UNKNOWN], [_CONTROL])}
    ids |= {name: fields[key] for name in _NAMED if (key := f"{_KEY}{name}_token_id") in fields}
    ends = {name: fields[key] for name in ("eot", "eom") if (key := f"{_KEY}{name}_token_id") in fields}
    wrong = [name for name, token in (ids | ends).items() if not isinstance(token, int) or not 0 <= token < len(names)]
    if wrong:
        raise _refused(f"{wrong[0]}_token_id", f"{(ids | ends)[wrong[0]]!r} is not an id of the {len(names)} tokens")
    named = {_NAMED[name]: names[token] for name, token in ids.items() if isinstance(token, int)}
    begins = model != "gpt2" or fields.get(_KEY + "pre") in _BEGINS
    special = frozenset({*named.values(), *filter(_ALWAYS_CONTROL.fullmatch, names)})
    return _Tokens(names, types, named, begins, special)


def _byte_level(fields: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Build a byte-level BPE tokenizer, without unused tokens, which only pad the embedding."""
    name = str(fields.get(_KEY + "pre") or "default")
    if name not in _CUT_OF:
        raise _refused("pre", f"unknown pre-tokenizer {name!r}; supported: {', '.join(sorted(_CUT_OF))}")
    vocab = _used(tokens)
    backend = Tokenizer(BPE(vocab=vocab, merges=_merges(fields), ignore_merges=name in _WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in _CUT_OF[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(fields: Mapping[str, object], tokens: _Tokens) -> Tokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback. Pairs are merged in the order of the merged token's
    score, or of the file's merges, and then within lines. Unlike in llama.cpp, text is never merged to a control
    token."""
    is_merged = fields[_KEY + "model"] == "gemma4"
    merges, vocab = _merges(fields) if is_merged else _merges_by_score(fields, tokens), _used(tokens)
    backend = Tokenizer(
        BPE(vocab=vocab, merges=merges, unk_token=tokens.named.get("unk_token"), fuse_unk=True, byte_fallback=True)
    )
    begins_with_blank = fields.get(_KEY + "add_space_prefix", True)
    blanks = normalizers.Replace(" ", _BLANK)
    if is_merged:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_BLANK), blanks]) if begins_with_blank else blanks
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begins_with_blank else steps)
    return backend


def _merges(fields: Mapping[str, object]) -> list[tuple[str, str]]:
    """Read the file's pairs of tokens, in the order in which they are merged."""
    return [(left, right) for left, _, right in (one.partition(" ") for one in _list(fields, "merges", str))]


def _merges_by_score(fields: Mapping[str, object], tokens: _Tokens) -> list[tuple[str, str]]:
    """List all pairs of tokens that make a token, by the score of what they make."""
    scores = _list(fields, "scores", float, len(tokens.names))
    made = {name: score for name, score, kind in zip(tokens.names, scores, tokens.types, strict=True) if kind in _TEXT}
    return [
        (name[:cut], name[cut:])
        for name in sorted(made, key=made.__getitem__, reverse=True)
        for cut in range(1, len(name))
        if name[:cut] in made and name[cut:] in made
    ]


def _used(tokens: _Tokens) -> dict[str, int]:
    """Map token names to ids, without unused tokens that are not special."""
    both = enumerate(zip(tokens.names, tokens.types, strict=True))
    return {name: index for index, (name, kind) in both if kind != _UNUSED or name in tokens.special}


def _added(fields: Mapping[str, object], tokens: _Tokens) -> list[AddedToken]:
    """List the tokens that are matched before merging: user-defined tokens, and control tokens, which are marked as
    special."""
    swallows = any(part in str(fields.get("general.name", "")).lower() for part in _PHI3)
    return [
        AddedToken(
            name,
            special=kind != _USER_DEFINED or name in tokens.special,
            normalized=False,
            rstrip=swallows and name not in _KEEPS_BLANKS,
        )
        for name, kind in zip(tokens.names, tokens.types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or name in tokens.special
    ]


def _around(fields: Mapping[str, object], tokens: _Tokens, backend: Tokenizer) -> processors.TemplateProcessing:
    """Build the post-processor that adds BOS and EOS, if the file or the default of its kind says so."""
    adds = {
        "bos": bool(fields.get(_KEY + "add_bos_token", tokens.begins)),
        "eos": bool(fields.get(_KEY + "add_eos_token", False)),
    }
    for name in (name for name, is_added in adds.items() if is_added and _NAMED[name] not in tokens.named):
        raise _refused(f"add_{name}_token", f"{name}_token_id is missing")
    bos, eos = ([tokens.named[_NAMED[name]]] if adds[name] else [] for name in ("bos", "eos"))
    ids = [(name, backend.token_to_id(name)) for name in (*bos, *eos)]
    return processors.TemplateProcessing(
        single=[*bos, "$A", *eos], pair=[*bos, "$A", *bos, "$B", *eos], special_tokens=ids
    )


def _templates(fields: Mapping[str, object]) -> str | dict[str, str] | None:
    """Read the chat template, or several by name. Returns None if the file has none."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): str(text) for name, text in fields.items() if name.startswith(key + ".")}
    if key in fields:
        named = {"default": str(fields[key]), **named}
    return named if named.keys() - {"default"} else named.get("default")


def _list(fields: Mapping[str, object], name: str, kind: type[T], length: int | None = None) -> list[T]:
    found = fields.get(_KEY + name)
    if not isinstance(found, list):
        raise _refused(name, "this list is missing in the file")
    values = [value for value in found if isinstance(value, kind)]
    if len(values) != (len(found) if length is None else length):
        raise _refused(name, f"it has {len(values)} values of the right type instead of {length or len(found)}")
    return values


def _refused(name: str, reason: str) -> StartupError:
    return StartupError(
        f"{_KEY}{name}: {reason}; convert the model again, or serve the folder from which it was converted"
    )
