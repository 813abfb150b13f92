"""Response files: whole lines or none, and what is too short to teach."""

from pathlib import Path

import pytest

from service.errors import StartupError
from service.training.responses import Response, ResponseFile, read_responses


def response(name: str, tokens: int = 6) -> Response:
    return Response(id=name, task="t", temperature=0.7, prompt=[1, 2, 3], response=list(range(tokens)))


def written(file: Path, *names: str) -> None:
    stream = ResponseFile(file)
    for name in names:
        stream.append(response(name))
    stream.close()


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.jsonl"
    written(file, "a", "b")
    answered = read_responses([file])
    assert answered.responses == [response("a"), response("b")]
    assert (answered.num_tokens, answered.num_response_tokens) == (18, 12)


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    stream = ResponseFile(tmp_path / "r.jsonl")
    stream.append(response("a"))
    assert read_responses([tmp_path / "r.jsonl"]).responses == [response("a")]
    stream.close()


def test_a_torn_line_is_dropped_wherever_it_was_torn(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    written(file, "a", "b")
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        file.write_bytes(whole[:size])
        again = ResponseFile(file)
        assert again.done == {"a"}
        again.append(response("b"))
        again.close()
        assert file.read_bytes() == whole


def test_a_bad_line_in_the_middle_is_not_dropped(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    written(file, "a", "b")
    file.write_text(file.read_text().replace('"id":"a"', '"id":7'))
    with pytest.raises(StartupError, match=r"r\.jsonl, line 1: id: "):
        ResponseFile(file)


def test_short_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(response(name, size).model_dump_json() + "\n" for name, size in (("a", 3), ("b", 4))))
    answered = read_responses([file])
    assert [kept.id for kept in answered.responses] == ["b"]
    assert answered.too_short == 1


def test_a_file_without_responses_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(StartupError, match="no response of at least 4 tokens"):
        read_responses([tmp_path / "r.jsonl"])
    with pytest.raises(StartupError, match="cannot be read"):
        read_responses([tmp_path / "none.jsonl"])
