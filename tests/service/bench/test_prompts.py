"""Prompt files: every form of line, and messages that name file and line."""

from pathlib import Path

import pytest

from service.assembly import Assembly
from service.bench.prompts import read_prompts, refuse_too_long
from service.errors import StartupError
from tests.service.bench.parts import written_prompts


def test_every_form_becomes_tokens(assembly: Assembly, tmp_path: Path) -> None:
    file = tmp_path / "some_set.jsonl"
    file.write_text("\n".join(written_prompts()) + "\n\n")
    found = read_prompts(file, assembly.tokenizer)
    assert found.name == "some_set"
    assert [assembly.tokenizer.decode(prompt) for prompt in found.prompts] == [
        "<|start|>user\nthat the other<|end|><|start|>assistant\n",
        "<|start|>user\nin the hat<|end|><|start|>assistant\n",
        "the line on the table",
    ]


def test_limit_reads_no_further(assembly: Assembly, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text("\n".join([*written_prompts(), "broken"]))
    assert len(read_prompts(file, assembly.tokenizer, limit=2).prompts) == 2


def test_a_line_separator_inside_a_string_ends_no_line(assembly: Assembly, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    (prompt,) = read_prompts(file, assembly.tokenizer).prompts
    assert assembly.tokenizer.decode(prompt) == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "Input should be an object"),
        ('{"task": "t"}', "none of `messages`, `turns` and `prompt`"),
        ('{"messages": [{"role": "user"}]}', "messages.0.content: Field required"),
        ('{"turns": "once"}', "turns: Input should be a valid array"),
    ],
)
def test_a_bad_line_is_named(assembly: Assembly, tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    with pytest.raises(StartupError) as caught:
        read_prompts(file, assembly.tokenizer)
    assert f"prompt file {file}, line 3: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_prompts_is_refused(assembly: Assembly, tmp_path: Path, content: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(content)
    with pytest.raises(StartupError, match="holds no prompt"):
        read_prompts(file, assembly.tokenizer)


def test_a_missing_file_is_refused(assembly: Assembly, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_prompts(tmp_path / "no.jsonl", assembly.tokenizer)


def test_a_prompt_needs_room_for_its_answer() -> None:
    refuse_too_long([[1] * 60], 40, 100, "set")
    with pytest.raises(StartupError, match="set: a prompt of 61 tokens and an answer of 40 exceed max_model_len=100"):
        refuse_too_long([[1], [1] * 61], 40, 100, "set")
