"""Thoughts before answers: read however they are cut, and a grammar holds for what is behind them."""

import random

import pytest
from pydantic import JsonValue

from service.grammars import GrammarKind, as_lark
from service.thinking import Thinking, ThoughtTokens, thinks
from service.tools import HERMES, AnswerReader, Call, CallReader
from tests.service.grammar_parts import COMPILER, TOKENIZER, matches

BEFORE, BEGUN = Thinking(has_begun=False), Thinking(has_begun=True)
ANSWERS = [
    (BEFORE, "<think>\nTwo </thin\n\nlines\n</think>\n\nYes.\n", ("Two </thin\n\nlines", "Yes.\n")),
    (BEFORE, "\n<think></think>Yes", ("", "Yes")),
    (BEFORE, "Yes <think> no", ("", "Yes <think> no")),
    (BEFORE, "\n\n<thin", ("", "\n\n<thin")),
    (BEFORE, "<think>cut o", ("cut o", "")),
    (BEFORE, "<think>cut off\n</thi", ("cut off\n</thi", "")),
    (BEFORE, "", ("", "")),
    (BEGUN, "Hm.\n</think>\nYes </think>.", ("Hm.", "Yes </think>.")),
    (BEGUN, "\n</think>Yes", ("", "Yes")),
    (BEGUN, "never ends", ("never ends", "")),
]


@pytest.mark.parametrize(("thinking", "text", "expected"), ANSWERS)
@pytest.mark.parametrize("seed", range(20))
def test_however_an_answer_is_cut(thinking: Thinking, text: str, expected: tuple[str, str], seed: int) -> None:
    rng, reader, left = random.Random(seed), AnswerReader(thinking, None), text
    said = {"thought": "", "text": ""}
    while True:
        size = rng.randint(1, 9)
        for piece in reader.read(left[:size], ends=len(left) <= size):
            said[piece.kind] += piece.text
        left = left[size:]
        if not left:
            break
    assert (said["thought"], said["text"]) == expected
    assert AnswerReader(thinking, None).whole(text) == (*expected, [])


@pytest.mark.parametrize(
    ("thinking", "tokens", "count"),
    [
        (BEFORE, ["\n", "<thi", "nk>", "Hm", "</th", "ink>\nYes", "."], 6),
        (BEFORE, ["<think>", "cut"], 2),
        (BEFORE, ["<", "b>", "</think>"], 0),
        (BEFORE, ["<think></think>", "Yes"], 1),
        (BEGUN, ["Hm", "</think>", "Yes"], 2),
    ],
)
def test_the_tokens_of_a_thought_are_counted(thinking: Thinking, tokens: list[str], count: int) -> None:
    counted = ThoughtTokens(thinking, tokens.__getitem__)
    for token in range(len(tokens)):
        counted.read([token])
    at_once = ThoughtTokens(thinking, tokens.__getitem__)
    at_once.read(range(len(tokens)))
    assert counted.count == at_once.count == count


def test_calls_stand_behind_a_thought() -> None:
    call = Call("now", "{}")
    text = f"<think>I could {HERMES.written([Call('old', '{}')])}</think>\n{HERMES.written([call])}"
    assert AnswerReader(BEFORE, CallReader(HERMES)).whole(text) == (
        f"I could {HERMES.written([Call('old', '{}')])}",
        "",
        [call],
    )


@pytest.mark.parametrize(
    ("prompt", "has_begun"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)]
)
def test_the_end_of_the_prompt_says_whether_it_has_begun(prompt: str, has_begun: bool) -> None:
    assert Thinking.after(prompt).has_begun is has_begun


def test_models_that_think_have_it_in_their_template() -> None:
    assert thinks("{% if '</think>' in content %}")
    assert not thinks("{{ messages }}")
    assert not thinks(None)


YES: dict[GrammarKind, tuple[JsonValue, str]] = {
    "json_schema": ({"enum": ["yes"]}, '"yes"'),
    "regex": ("y/?es", "yes"),
    "choice": (["yes", "no"], "yes"),
    "grammar": ('root ::= "yes"', "yes"),
}


def accepts(grammar: str, text: str) -> bool:
    return matches(COMPILER.compile("lark", grammar), TOKENIZER._parsing.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", YES)
def test_a_grammar_holds_behind_a_thought(kind: GrammarKind) -> None:
    source, yes = YES[kind]
    grammar = as_lark(kind, source)
    begun, before = (thinking.grammar(grammar, {}) for thinking in (BEGUN, BEFORE))
    assert accepts(begun, f"no\n{{</thin</think>\n\n{yes}")
    assert accepts(before, f"<think>no\n</think>{yes}")
    assert accepts(before, yes)
    for text in (yes, "no</think>nay", f"a</think>{yes}</think>"):
        assert not accepts(begun, text)
    for text in ("nay", "<think>yes", f"<think>no</think>{yes}no"):
        assert not accepts(before, text)


def test_tags_may_be_tokens_outside_of_the_text() -> None:
    special = {"<think>": TOKENIZER.special_ids["<|extra_0|>"], "</think>": TOKENIZER.special_ids["<|extra_1|>"]}
    grammar = BEFORE.grammar(as_lark("choice", ["yes"]), special)
    assert accepts(grammar, "<|extra_0|>no<|extra_1|>yes")
    assert not accepts(grammar, "<think>no</think>yes")
    assert not accepts(BEGUN.grammar(as_lark("choice", ["yes"]), special), "no<|extra_1|>no")
