"""Names of special tokens in a client's text: all are hidden from the template, the longest first, and come back."""

import random

import pytest
from tokenizers import AddedToken

from service.text.tokenizer import SpecialNames, SpecialTokenGuard, control_tokens

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
    find = SpecialNames(NAMES).find
    assert find is not None
    ordered = sorted(NAMES, key=len, reverse=True)
    first = min((text.find(name) for name in NAMES if name in text), default=None)
    expected = None if first is None else next(name for name in ordered if text.startswith(name, first))
    found = find.search(text)
    assert (None if found is None else found[0]) == expected


def test_random_texts_come_back_without_names_between() -> None:
    draw, special = random.Random(1), SpecialNames(NAMES)
    for _ in range(300):
        text = "".join(draw.choices([*NAMES, "<", "a", ">", "|", "1"], k=12))
        guard = SpecialTokenGuard(special)
        hidden = str(guard.hide(text))
        assert not any(name in hidden for name in NAMES)
        assert guard.reveal(hidden) == text


def test_without_names_nothing_is_hidden() -> None:
    guard = SpecialTokenGuard(SpecialNames([]))
    assert (guard.hide("<a>"), guard.hid_something) == ("<a>", False)


def test_turns_of_gemma_are_control_tokens_whatever_files_say() -> None:
    names = ["<start_of_turn>", "<end_of_turn>", "<tool_call>", "<|im_end|>"]
    added = {number: AddedToken(name, special=False) for number, name in enumerate(names)}
    assert control_tokens(added) == {"<start_of_turn>": 0, "<end_of_turn>": 1, "<|im_end|>": 3}
