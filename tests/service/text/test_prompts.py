"""Prompt files: every form of line, what is read, and messages that name file and line."""

from pathlib import Path

import pytest

from service.errors import StartupError
from service.text.prompts import PromptMessage, read_prompt_set, read_prompts, refuse_too_long, source_of
from service.text.tokenizer import ChatTokenizer
from tests.service.bench.parts import written_prompts
from tests.tiny_models import tiny_tokenizer

GOOD = '{"id": "a-1", "task": "qa", "messages": [{"role": "user", "content": "in the hat"}], "extra": 1}\n'
TOKENIZER = ChatTokenizer(tiny_tokenizer())


def test_prompts_of_all_files_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(GOOD + "\n" + GOOD.replace("a-1", "a-2").replace("in the", "in\u2028the"))
    two.write_text(GOOD.replace("a-1", "b-1"))
    prompts = read_prompts([one, two])
    assert [(prompt.id, prompt.task) for prompt in prompts] == [("a-1", "qa"), ("a-2", "qa"), ("b-1", "qa")]
    assert prompts[1].messages == [PromptMessage(role="user", content="in\u2028the hat")]


def test_every_form_becomes_tokens(tmp_path: Path) -> None:
    file = tmp_path / "some_set.jsonl"
    file.write_text("\n".join(written_prompts()) + "\n\nbroken")
    found = read_prompt_set(file, TOKENIZER, limit=3)
    assert found.name == "some_set"
    assert [TOKENIZER.decode(prompt) for prompt in found.prompts] == [
        "<|start|>user\nthat the other<|end|><|start|>assistant\n",
        "<|start|>user\nin the hat<|end|><|start|>assistant\n",
        "the line on the table",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ("{}", "line 1: id: Field required"),
        (GOOD + '{"id": "b", "messages": []}', "line 2: messages: List should have at least 1 item"),
        (GOOD + GOOD, "line 2: the id 'a-1' is used twice"),
        (GOOD + "nonsense", "line 2: Invalid JSON"),
    ],
)
def test_a_bad_file_is_a_message(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(StartupError, match=complaint):
        read_prompts([file])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n\n", " holds no prompt"),
        ("\n{", ", line 2: Invalid JSON"),
        ("[1]", ", line 1: Input should be an object"),
        ('{"task": "t"}', "`messages`, `turns` and `prompt` are all empty"),
        ('{"prompt": "fine"}\n{"messages": [{"role": "user"}]}', ", line 2: messages.0.content: Field required"),
        ('{"turns": "once"}', ", line 1: turns: Input should be a valid array"),
    ],
)
def test_a_bad_file_to_bench_with_is_a_message(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(StartupError, match=f"prompt file {file}.*{complaint}"):
        read_prompt_set(file, TOKENIZER)


def test_a_missing_file_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])


def test_a_prompt_needs_room_for_its_answer() -> None:
    refuse_too_long([[1] * 60], 40, 100, "set")
    with pytest.raises(StartupError, match="set: a prompt of 61 tokens and an answer of 40 exceed max_model_len=100"):
        refuse_too_long([[1], [1] * 61], 40, 100, "set")


@pytest.mark.parametrize(
    ("prompt_id", "source"), [("wmt21-de-en-264", "wmt21-de-en"), ("gsm8k-train-1", "gsm8k-train"), ("lone", "lone")]
)
def test_the_source_is_the_id_without_its_number(prompt_id: str, source: str) -> None:
    assert source_of(prompt_id) == source
