"""Drawn trees: who is drawn where and how marked, the answer's colours, and well-formed files."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from service.assembly import Assembly
from service.bench import tree
from service.bench.observe import BlockRecord, StepRecord
from service.bench.tree import Question, answered, chosen_steps, draw, picture_of
from service.bench.tree_picture import Picture, Piece, answer_pieces, drawn_tree, text_of, tree_title
from service.cli import app
from service.errors import StartupError

WORDS = {0: " is", 1: " a", 2: " the", 5: " <b>", 6: "\n", 7: " fox"}
CANDIDATES = {(1,): 0.5, (2,): 0.3, (1, 5): 0.2, (1, 6): 0.25, (1, 6, 7): 0.1}
STEP = StepRecord(
    root=0,
    truth=(1, 6, 5, 2),
    accepted=2,
    candidates=CANDIDATES,
    proposals={"lookup": {(2,): 0.3, (1,): 0.1}, "specblock": {path: 1.0 for path in CANDIDATES if path != (2,)}},
    blocks=(
        BlockRecord(0, (), ((1, 9), (5, 6)), (0, 0)),
        BlockRecord(1, (1, 6), ((7, 8), (8, 9)), (0, 0)),
        BlockRecord(1, (1,), ((6, 5), (7, 8)), (0, 0)),
    ),
    verified=frozenset(CANDIDATES) - {(1, 5)},
)
TREE = drawn_tree(STEP, "a tree", WORDS.__getitem__)
PICTURE = Picture((TREE,), (Piece("first line\nsec", "bonus"), Piece("ond & last", "accepted")), "a caption")


def test_the_text_shows_the_verified_tree_and_its_origins() -> None:
    assert text_of(PICTURE).plain.splitlines() == [
        "a tree",
        '" is"',
        '├─✓ " a"  0.50  lookup and specblock, forward 1',
        '│  └─✓ "\\n"  0.25  specblock, forward 1',
        '│     └─  " fox"  0.10  specblock, forward 2',
        '└─  " the"  0.30  lookup',
        "",
        "first line",
        "second & last",
        "",
        "a caption",
    ]


def test_the_title_counts() -> None:
    assert tree_title(STEP, 3, 9, WORDS.__getitem__) == (
        'step 3 of 9: 4 nodes verified, 2 accepted, then " <b>" from the target'
    )


def texts_of(picture: Picture, file: Path) -> list[str]:
    """What the drawn page says, with spaces as they were."""
    draw(picture, file)
    elements = ElementTree.fromstring(file.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return [str(element.text).replace("\N{NO-BREAK SPACE}", " ") for element in elements]


def test_the_svg_shows_nodes_origins_and_the_answer(tmp_path: Path) -> None:
    texts = texts_of(PICTURE, tmp_path / "tree.svg")
    assert {"a tree", '" is"', '" a"', '"\\n"', "0.25", "proposed by lookup", "ond & last", "a caption"} <= set(texts)
    assert (tmp_path / "tree.svg").read_text().count("stroke: #15803d") >= 5  # three boxes and two edges


def test_control_characters_do_not_break_the_svg(tmp_path: Path) -> None:
    picture = Picture((), (Piece("a\x00\x1b<\x07", "bonus"),), "")
    assert "a\ufffd\ufffd<\ufffd" in texts_of(picture, tmp_path / "tree.svg")


def test_long_answers_are_cut_into_lines(tmp_path: Path) -> None:
    texts = texts_of(Picture((TREE, TREE), (Piece("word " * 100, "accepted"),), "c"), tmp_path / "tree.svg")
    answer = [text for text in texts if set(text) <= set("word ")]
    assert "".join(answer) == "word " * 100
    assert max(map(len, answer)) == 96


def test_pieces_follow_acceptance_and_never_split_a_character() -> None:
    steps = [
        StepRecord(root=0, truth=(10, 11), accepted=0),
        StepRecord(root=0, truth=(11, 12, 13), accepted=1),
        StepRecord(root=0, truth=(13, 14, 15), accepted=2),
    ]
    spelled = {10: b"a", 11: b"\xc3", 12: b"\xa9", 13: b"b", 14: b"c", 15: b"d"}

    def decode(tokens: list[int]) -> str:
        return b"".join(spelled[token] for token in tokens).decode(errors="replace")

    pieces = answer_pieces(steps, 5, decode)  # type: ignore[arg-type]
    assert pieces == [Piece("a\xe9", "bonus"), Piece("bc", "accepted")]


def test_steps_are_chosen_by_number_or_by_accepted_path() -> None:
    plain = StepRecord(root=0, truth=(1,), accepted=0)
    short = StepRecord(root=0, truth=(1, 2), accepted=1, verified=frozenset({(1,)}))
    steps = [plain, short, plain, STEP, short]
    assert chosen_steps(steps, first=None, count=1) == [3]
    assert chosen_steps(steps, first=1, count=2) == [1, 3]
    assert chosen_steps(steps, first=None, count=9) == [3, 4]
    with pytest.raises(StartupError, match="no step from step 6 on verified a draft tree"):
        chosen_steps(steps, first=6, count=1)
    with pytest.raises(StartupError, match="set budget_policy to fixed"):
        chosen_steps([plain], first=None, count=1)


def test_the_pieces_are_the_answer(trained_assembly: Assembly) -> None:
    answer, steps = answered(trained_assembly, Question("the cat in the hat", True, 0.0, 40, 1))
    shown = "".join(piece.text for piece in answer_pieces(steps, 40, trained_assembly.tokenizer.decode))
    assert shown == trained_assembly.tokenizer.decode(answer.token_ids) == answer.text


def run_tree(assembly: Assembly, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, object]:
    monkeypatch.setattr(tree, "assemble", lambda config: assembly)
    monkeypatch.setattr("service.logging.configure_logging", lambda level, *, as_json: None)
    command = ["tree", "--prompt", "that the other the other the other", "--max-tokens", "48", *arguments]
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, command)
    return result.exit_code, result.output, result.exception


@pytest.mark.parametrize("suffix", [".txt", ".svg"])
def test_the_command_draws(
    trained_assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    file = tmp_path / f"tree{suffix}"
    code, output, _ = run_tree(trained_assembly, monkeypatch, "--steps", "2", "--out", str(file))
    assert code == 0, output
    assert output.count("nodes verified") == 2
    written = file.read_text()
    if suffix == ".txt":
        assert output.splitlines() == written.splitlines()
        return
    assert ElementTree.fromstring(written).tag.endswith("svg")


def test_another_kind_of_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for name, words in (("tree.pdf", "give a name that ends in .txt, .svg, .png"), ("no/tree.svg", "in a folder that")):
        result = CliRunner().invoke(app, ["tree", "--prompt", "a", "--out", str(tmp_path / name)])
        assert isinstance(result.exception, StartupError)
        assert words in str(result.exception)


def test_a_png_is_painted(tmp_path: Path) -> None:
    file = tmp_path / "tree.png"
    draw(PICTURE, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_drafter_that_never_drafts_is_said(assembly: Assembly) -> None:
    answer, steps = answered(assembly, Question("a", True, 1.5, 3, 1))
    silent = [StepRecord(root=step.root, truth=step.truth, accepted=0) for step in steps]
    with pytest.raises(StartupError, match="drafting did not pay"):
        picture_of(assembly, answer, silent, first=None, count=1)
