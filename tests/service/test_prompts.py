"""Prompt files: what is read, and how a bad line is named."""

from pathlib import Path

import pytest

from service.errors import StartupError
from service.prompts import read_prompts, source_of

GOOD = '{"id": "a-1", "task": "qa", "messages": [{"role": "user", "content": "in the hat"}], "extra": 1}\n'


def test_prompts_of_all_files_in_order(tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text(GOOD + "\n" + GOOD.replace("a-1", "a-2").replace("in the", "in\u2028the"))
    two.write_text(GOOD.replace("a-1", "b-1"))
    prompts = read_prompts([one, two])
    assert [(prompt.id, prompt.task) for prompt in prompts] == [("a-1", "qa"), ("a-2", "qa"), ("b-1", "qa")]
    assert prompts[1].messages == ({"role": "user", "content": "in\u2028the hat"},)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no prompt"),
        ("\n\n", "holds no prompt"),
        ("{}", "line 1: id: Field required"),
        (GOOD + '{"id": "b", "messages": []}', "line 2: messages: List should have at least 1 item"),
        (GOOD + GOOD, "line 2: the id 'a-1' stands here again"),
        (GOOD + "nonsense", "line 2: Invalid JSON"),
    ],
)
def test_a_bad_file_is_a_message(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(StartupError, match=complaint):
        read_prompts([file])


def test_a_missing_file_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_prompts([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("prompt_id", "source"), [("wmt21-de-en-264", "wmt21-de-en"), ("gsm8k-train-1", "gsm8k-train"), ("lone", "lone")]
)
def test_the_source_is_the_id_without_its_number(prompt_id: str, source: str) -> None:
    assert source_of(prompt_id) == source
