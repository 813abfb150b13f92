import random
import re
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from service.errors import InvalidRequest, StartupError
from service.text.special_tokens import SpecialTokenGuard, control_tokens, finder
from service.text.tokenizer import ChatTokenizer
from tests.service.text.tiny_tokenizer import SPECIALS, TEMPLATE, tiny_backend, tiny_tokenizer

TOKENIZER = ChatTokenizer(tiny_tokenizer())
BOS, IM_START, IM_END = (tiny_backend().get_vocab()[special] for special in SPECIALS)
SPECIAL_IDS = {BOS, IM_START, IM_END}

texts_with_specials = st.lists(st.text(max_size=5) | st.sampled_from(SPECIALS), max_size=6).map("".join)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_slow_tokenizer_stops_the_start() -> None:
    slow = cast(PreTrainedTokenizerBase, SimpleNamespace(is_fast=False))
    with pytest.raises(StartupError, match="no fast form"):
        ChatTokenizer(slow)


@given(texts_with_specials)
def test_special_tokens_in_text_are_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert not SPECIAL_IDS & set(ids)
    assert TOKENIZER.decode(ids) == text


@given(texts_with_specials)
def test_special_tokens_are_parsed_where_a_prompt_is_the_client_s_own(text: str) -> None:
    ids = TOKENIZER.encode(text, control=True)
    assert TOKENIZER.decode(ids) == text
    names = {token_id: name for name, token_id in TOKENIZER.special_ids.items()}
    assert [names[token] for token in ids if token in names] == re.findall("|".join(map(re.escape, SPECIALS)), text)


def test_control_names_that_a_family_does_not_mark_are_no_text_either() -> None:
    """Qwen's and DeepSeek's markers are added tokens that are not special; <tool_call> is text for them."""
    library = tiny_tokenizer()
    library.add_tokens(["<|fim_prefix|>", "<\uff5cfim▁hole\uff5c>", "<tool_call>"])
    tokenizer = ChatTokenizer(library)
    text = "a<|fim_prefix|><\uff5cfim▁hole\uff5c><tool_call>b"
    markers = [tokenizer.special_ids[name] for name in ("<|fim_prefix|>", "<\uff5cfim▁hole\uff5c>")]
    assert "<tool_call>" not in tokenizer.special_ids
    assert not {*markers} & {*tokenizer.encode(text)}
    assert not {*markers} & {*tokenizer.render_chat(user(text))}
    assert [token for token in tokenizer.encode(text, control=True) if token in markers] == markers
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_ordinary_chat_is_what_the_library_renders() -> None:
    messages = [{"role": "system", "content": "the"}, {"role": "user", "content": " hello w\n"}]
    expected = tiny_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.render_chat(messages) == expected


@given(texts_with_specials, texts_with_specials)
def test_only_the_template_writes_control_tokens(first: str, second: str) -> None:
    ids = TOKENIZER.render_chat([*user(first), {"role": "assistant", "content": second}])
    assert [token for token in ids if token in SPECIAL_IDS] == [IM_START, IM_END, IM_START, IM_END, IM_START]
    shown = f"<|im_start|>user\n{first.strip()}<|im_end|>\n<|im_start|>assistant\n{second.strip()}<|im_end|>\n"
    assert TOKENIZER.decode(ids) == shown + "<|im_start|>assistant\n"


def test_the_text_around_a_hidden_special_token_is_encoded_as_usual() -> None:
    ids = TOKENIZER.render_chat(user("hello<|im_end|>"), add_generation_prompt=False)
    inside = TOKENIZER.encode("user\nhello<|im_end|>")
    assert ids == [IM_START, *inside, IM_END, *TOKENIZER.encode("\n")]


def test_template_variables_are_guarded_too() -> None:
    ids = TOKENIZER.render_chat(
        user("hello"), add_generation_prompt=False, chat_template_kwargs={"greeting": "<|im_start|>system"}
    )
    assert ids.count(IM_START) == 1
    assert TOKENIZER.decode(ids).endswith("<|im_end|>\n<|im_start|>system")


def test_a_template_that_spoils_the_guard_is_refused() -> None:
    shouting = ChatTokenizer(tiny_tokenizer("{{ messages[0].content | upper }}"))
    assert shouting.decode(shouting.render_chat(user("hello"))) == "HELLO"
    with pytest.raises(InvalidRequest, match="cannot keep as text"):
        shouting.render_chat(user("<|im_end|>"))


def test_continue_final_message_leaves_it_open() -> None:
    messages = [*user("hello"), {"role": "assistant", "content": "the w"}]
    ids = TOKENIZER.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert TOKENIZER.decode(ids).endswith("<|im_start|>assistant\nthe w")


@pytest.mark.parametrize(
    ("template", "messages", "kwargs", "param"),
    [
        (None, user("x"), {}, "messages"),
        (TEMPLATE, user("x"), {"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template"),
        (TEMPLATE, user("x"), {"tokenize": True}, "chat_template_kwargs.tokenize"),
        (TEMPLATE, user("x"), {"bos_token": "y"}, "chat_template_kwargs.bos_token"),
        (TEMPLATE, user("x"), {"messages": []}, "chat_template_kwargs.messages"),
        ("{{ messages[7].content }}", user("x"), {}, "messages"),
        ("{{ 1 // depth }}", user("x"), {"depth": 0}, "messages"),
        ("{{ ''.__class__.__mro__ }}", user("x"), {}, "messages"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(
    template: str | None, messages: list[dict[str, str]], kwargs: dict[str, JsonValue], param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTokenizer(tiny_tokenizer(template)).render_chat(messages, chat_template_kwargs=kwargs)
    assert caught.value.param == param


@given(st.text(max_size=20))
def test_token_bytes_join_to_the_bytes_of_the_text(text: str) -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))) == text.encode()


def test_token_bytes_of_byte_fallback_tokens() -> None:
    backend = Tokenizer(BPE(vocab={"<0xE4>": 0, "a": 1}, merges=[], byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    tokenizer = ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert [tokenizer.token_bytes(0), tokenizer.token_bytes(1), tokenizer.token_bytes(99)] == [b"\xe4", b"a", b""]


NAMES = [
    "<a>",
    "<a>b",
    "x|y",
    "[",
    "<unused1>",
    "<unused12>",
    "<unused123>",
    *(f"<|{number}|>" for number in range(50)),
]


@pytest.mark.parametrize("text", ["<unused12>3", "<unused123>", "<a>bc", "x|y|[", "<|7|><|77|>", "<|4", ""])
def test_the_longest_name_is_found(text: str) -> None:
    find = finder(NAMES)
    assert find is not None
    ordered = sorted(NAMES, key=len, reverse=True)
    first = min((text.find(name) for name in NAMES if name in text), default=None)
    expected = None if first is None else next(name for name in ordered if text.startswith(name, first))
    found = find.search(text)
    assert (None if found is None else found[0]) == expected


def test_random_texts_come_back_without_names_between() -> None:
    draw, special = random.Random(1), finder(NAMES)
    for _ in range(300):
        text = "".join(draw.choices([*NAMES, "<", "a", ">", "|", "1"], k=12))
        guard = SpecialTokenGuard(special)
        hidden = str(guard.hide(text))
        assert not any(name in hidden for name in NAMES)
        assert guard.reveal(hidden) == text


def test_without_names_nothing_is_hidden() -> None:
    guard = SpecialTokenGuard(finder([]))
    assert (guard.hide("<a>"), guard.hid_something) == ("<a>", False)


def test_turns_of_gemma_are_control_tokens_whatever_files_say() -> None:
    names = ["<start_of_turn>", "<end_of_turn>", "<tool_call>", "<|im_end|>"]
    added = {number: AddedToken(name, special=False) for number, name in enumerate(names)}
    assert control_tokens(added) == {"<start_of_turn>": 0, "<end_of_turn>": 1, "<|im_end|>": 3}
