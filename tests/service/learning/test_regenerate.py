"""Answers: the engine's own, at mixed temperatures, the same after a kill."""

from contextlib import closing
from pathlib import Path

import pytest

from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import StartupError
from service.learning.regenerate import Answering, Response, ResponseFile, answer_prompts, read_responses, regenerate
from service.text.prompts import Prompt, PromptMessage, read_prompts
from tests.service.engine.harness import ask
from tests.service.learning.parts import save_target, settings, write_prompts

HOW = Answering(max_tokens=10, concurrency=3, seed=5)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assemble(settings(save_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture
def prompts(tmp_path: Path) -> list[Prompt]:
    return read_prompts([write_prompts(tmp_path / "p.jsonl", 14)])


def answer(assembly: Assembly, prompts: list[Prompt], out: Path, how: Answering = HOW) -> dict[str, Response]:
    engine, longest = assembly.engine(), assembly.limits.max_model_len
    with closing(ResponseFile(out)) as file:
        count = regenerate(engine, assembly.tokenizer, prompts, file, how, max_model_len=longest)
    assert count == len(out.read_text().splitlines())
    return {response.id: response for response in read_responses([out])}


def test_answers_are_what_the_engine_says(assembly: Assembly, prompts: list[Prompt], tmp_path: Path) -> None:
    found = answer(assembly, prompts, tmp_path / "r.jsonl")
    assert found.keys() == {prompt.id for prompt in prompts}
    assert {response.temperature for response in found.values()} == {0.0, 0.7, 1.0}
    greedy = next(response for response in found.values() if response.temperature == 0)
    engine = assembly.engine()
    ask(
        engine,
        GenerationRequest(
            request_id="again",
            prompt=greedy.prompt,
            sampling=SamplingParams(seed=0, max_tokens=HOW.max_tokens, temperature=0.0),
        ),
    )
    tokens: list[int] = []
    while not engine.idle:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert greedy.response == tokens
    asked = next(prompt for prompt in prompts if prompt.id == greedy.id)
    assert greedy.prompt == asked.tokens(assembly.tokenizer)


def test_a_killed_run_ends_with_the_same_answers(assembly: Assembly, prompts: list[Prompt], tmp_path: Path) -> None:
    whole = answer(assembly, prompts, tmp_path / "whole.jsonl")
    torn = tmp_path / "torn.jsonl"
    content = (tmp_path / "whole.jsonl").read_bytes()
    torn.write_bytes(content[: len(content) // 2])
    assert answer(assembly, prompts, torn) == whole


def test_prompts_that_leave_no_room_are_left_out(
    assembly: Assembly, prompts: list[Prompt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = Prompt(id="long-1", messages=[PromptMessage(role="user", content="the hat " * 300)])
    found = answer(assembly, [long, *prompts[:2]], tmp_path / "r.jsonl")
    assert found.keys() == {prompt.id for prompt in prompts[:2]}
    assert "left out 1 prompts of more than 246 tokens" in capsys.readouterr().err


def test_when_time_is_up_what_was_begun_is_finished(assembly: Assembly, prompts: list[Prompt], tmp_path: Path) -> None:
    ended = Answering(max_tokens=10, concurrency=3, seed=5, deadline=0.0)
    engine = assembly.engine()
    with closing(ResponseFile(tmp_path / "r.jsonl")) as file:
        count = regenerate(engine, assembly.tokenizer, prompts, file, ended, max_model_len=256)
    assert count == 3
    assert engine.idle


def response(name: str, tokens: int = 6) -> Response:
    return Response(id=name, task="t", temperature=0.7, prompt=[1, 2, 3], response=list(range(tokens)))


def written(file: Path, *names: str) -> None:
    stream = ResponseFile(file)
    for name in names:
        stream.append(response(name))
    stream.close()


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    stream = ResponseFile(tmp_path / "r.jsonl")
    stream.append(response("a"))
    assert read_responses([tmp_path / "r.jsonl"]) == [response("a")]
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


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"id": "a-1", "messages": []}', '{"id":7}\n{"id":"'])
def test_a_file_of_something_else_is_refused_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "notes").write_text(content)
    with pytest.raises(StartupError, match=r"response file .*notes"):
        ResponseFile(tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == content


def test_a_place_that_cannot_be_written_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    nowhere = ServiceConfig.model_validate({"model": "./no-such-folder"})
    prompts = [write_prompts(tmp_path / "p.jsonl")]
    for out in (tmp_path, prompts[0] / "r.jsonl"):
        with pytest.raises(StartupError, match=r"response file .* cannot be written \(.*\): give another file"):
            answer_prompts(nowhere, prompts, out, HOW)


def test_short_responses_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(response(name, size).model_dump_json() + "\n" for name, size in (("a", 3), ("b", 4))))
    assert [kept.id for kept in read_responses([file])] == ["b"]
    assert "left out 1 responses" in capsys.readouterr().err


def test_a_file_without_responses_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(StartupError, match="no response of at least 4 tokens"):
        read_responses([tmp_path / "r.jsonl"])
    with pytest.raises(StartupError, match="cannot be read"):
        read_responses([tmp_path / "none.jsonl"])
