"""Tokenizers of GGUF files: tokens as llama.cpp makes them, from small vocabularies with known answers."""

from collections.abc import Mapping, Sequence

import pytest
from tokenizers import pre_tokenizers

from service.engine.gguf_tokenizer import tokenizer_of
from service.errors import StartupError
from service.text.tokenizer import ChatTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MERGES = ["1 2", "12 3", "123 4", "a b", "Ġ a", "Ġ Ġ", "A b", "' S", "hel lo", "Ã ©"]
FIRST = "tokenizer.ggml."


def fields_of(model: str, listed: Sequence[tuple[str, int]], **more: object) -> dict[str, object]:
    lists = {"tokens": [name for name, _ in listed], "token_type": [kind for _, kind in listed]}
    given = {"model": model, **lists, **more}
    return {name if "." in name else FIRST + name: value for name, value in given.items() if value is not None}


def byte_level(pre: str | None = "gpt-2", **more: object) -> dict[str, object]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "hel", "lo", *(merge.replace(" ", "") for merge in MERGES)]
    others = [("<|bos|>", CONTROL), ("<|im_end|>", NORMAL), ("<think>", USER_DEFINED), ("[PAD9]", UNUSED)]
    tokens = [*((word, NORMAL) for word in words), *others]
    bos = next(place for place, (name, _) in enumerate(tokens) if name == "<|bos|>")
    given = {"pre": pre, "merges": MERGES, "bos_token_id": bos, "eos_token_id": bos + 1, **more}
    return fields_of("gpt2", tokens, **given)


def sentencepiece(**more: object) -> dict[str, object]:
    bytes_ = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    words = ["▁", "a", "b", "▁a", "ab", "▁ab", "<", "/", "s", ">", "</", "s>", "[", "U", "]", "▁▁"]
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *bytes_, *((word, NORMAL) for word in words)]
    tokens += [("  x", USER_DEFINED), ("[U]", UNUSED)]
    better = {"ab": -1.0, "▁a": -2.0, "▁ab": -3.0, "</": -4.0, "s>": -5.0, "▁▁": -6.0}
    scores = [better.get(name, 0.0 if kind in (CONTROL, USER_DEFINED) else -99.0) for name, kind in tokens]
    return fields_of("llama", tokens, scores=scores, **more)


def pieces(fields: Mapping[str, object], text: str, *, add_special_tokens: bool = False) -> list[str | None]:
    """The tokens of a text in which the names of control tokens are text."""
    tokenizer = ChatTokenizer(tokenizer_of(fields))
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return [tokenizer.token_string(token) for token in ids]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("gpt-2", "ab  ab", ["ab", "Ġ", "Ġ", "ab"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("refact", "a12", ["a", "1", "2"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "hello", ["hello"]),
        ("dbrx", "12341", ["123", "4", "1"]),
        ("qwen2", "12", ["1", "2"]),
        ("qwen2", "a'S", ["a", "'S"]),
        ("gpt-2", "a'S", ["a", "'", "S"]),
        ("tekken", "abAb12", ["ab", "Ab", "1", "2"]),
        ("gpt-4o", "abAb1234", ["ab", "Ab", "123", "4"]),
        ("default", "1234", ["123", "4"]),
        (None, "1234", ["123", "4"]),
        ("deepseek-v3", "é1234", ["Ã©", "123", "4"]),
        ("gpt-2", "<|bos|>", ["<", "|", "b", "o", "s", "|", ">"]),
        ("gpt-2", "a<think>b", ["a", "<think>", "b"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str | None, text: str, expected: list[str]) -> None:
    assert pieces(byte_level(pre), text) == expected


def test_a_word_that_is_a_token_stays_whole_where_the_model_was_trained_so() -> None:
    without = [merge for merge in MERGES if merge != "hel lo"]
    assert pieces(byte_level("llama-bpe", merges=without), "hello") == ["hello"]
    assert pieces(byte_level("dbrx", merges=without), "hello") == list("hello")


@pytest.mark.parametrize(
    ("more", "text", "expected"),
    [
        ({}, "ab", ["▁ab"]),
        ({}, " ab", ["▁", "▁ab"]),
        ({}, "bé\n", ["▁", "b", "<0xC3>", "<0xA9>", "<0x0A>"]),
        ({"add_space_prefix": False}, "ab a", ["ab", "▁a"]),
        ({}, "a</s>", ["▁a", "</", "s>"]),
        ({}, "a  xb", ["▁a", "  x", "▁", "b"]),
        ({}, "[U]", ["▁", "[", "U", "]"]),
        ({}, "a   b", ["▁a", "▁▁", "▁", "b"]),
    ],
)
def test_sentencepiece_merges_the_best_first(more: dict[str, object], text: str, expected: list[str]) -> None:
    assert pieces(sentencepiece(**more), text) == expected


@pytest.mark.parametrize("fields", [byte_level(), sentencepiece(), sentencepiece(add_space_prefix=False)])
@pytest.mark.parametrize("text", ["ab a", " é日\n🦊", "<s> 12", "[U]", ""])
def test_what_is_encoded_is_decoded(fields: Mapping[str, object], text: str) -> None:
    tokenizer = ChatTokenizer(tokenizer_of(fields))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (sentencepiece(), ["<s>", "▁a"]),
        (sentencepiece(add_bos_token=False, add_eos_token=True), ["▁a", "</s>"]),
        (byte_level(), ["a"]),
        (byte_level("llama-bpe"), ["<|bos|>", "a"]),
        (byte_level("tekken", add_bos_token=False), ["a"]),
        (byte_level(add_bos_token=True, add_eos_token=True), ["<|bos|>", "a", "<|im_end|>"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(fields: Mapping[str, object], expected: list[str]) -> None:
    assert pieces(fields, "a", add_special_tokens=True) == expected


def test_control_tokens_are_special_even_where_the_file_calls_them_normal() -> None:
    tokenizer = ChatTokenizer(tokenizer_of(byte_level(bos_token_id=None, eos_token_id=None)))
    assert set(tokenizer.special_ids) == {"<|bos|>", "<|im_end|>"}
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>", control=True), skip_special_tokens=True) == "a"


def test_a_token_for_padding_stays_text() -> None:
    tokenizer = ChatTokenizer(tokenizer_of(byte_level(padding_token_id=0)))
    assert tokenizer.decode([0], skip_special_tokens=True) == "!"


def test_unused_tokens_of_byte_level_vocabularies_are_no_tokens() -> None:
    fields = byte_level()
    size = len(fields[FIRST + "tokens"])  # type: ignore[arg-type]  # a list
    assert ChatTokenizer(tokenizer_of(fields)).unknown_ids(size) == [size - 1]
    assert ChatTokenizer(tokenizer_of(sentencepiece())).unknown_ids(size) == []


def test_special_tokens_of_phi_3_swallow_the_blanks_after_them() -> None:
    for name, expected in (("Phi-3 mini", ["ab", "</s>", "ab"]), ("other", ["ab", "</s>", "▁ab"])):
        fields = sentencepiece(add_space_prefix=False) | {"general.name": name}
        tokenizer = ChatTokenizer(tokenizer_of(fields))
        assert [tokenizer.token_string(token) for token in tokenizer.encode("ab</s> ab", control=True)] == expected


def test_chat_templates_come_along() -> None:
    key = "tokenizer.chat_template"
    assert tokenizer_of(byte_level()).chat_template is None
    assert tokenizer_of(byte_level() | {key: "x"}).chat_template == "x"
    both = byte_level() | {key: "x", key + ".tool_use": "y", "tokenizer.chat_templates": ["tool_use"]}
    assert tokenizer_of(both).chat_template == {"default": "x", "tool_use": "y"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (byte_level("mine"), "pre: .*'mine'"),
        (byte_level() | {FIRST + "model": "rwkv"}, "model: .*'rwkv'"),
        ({}, "model: .*None"),
        (byte_level(merges=None), "merges: "),
        (byte_level(merges=["q q"]), "merges: "),
        (byte_level(merges=[1]), "merges: "),
        (byte_level(token_type=[1, 1]), "token_type: .*2 values"),
        (byte_level(tokens=["a", "b", "a"], token_type=None), "tokens: 'a' .*twice"),
        (sentencepiece() | {FIRST + "scores": [0.5]}, "scores: "),
        (byte_level(bos_token_id=99_999), "bos_token_id: "),
        (byte_level(bos_token_id=None, add_bos_token=True), "add_bos_token: "),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: Mapping[str, object], named: str) -> None:
    with pytest.raises(StartupError, match=f"tokenizer.ggml.{named}"):
        tokenizer_of(fields)
