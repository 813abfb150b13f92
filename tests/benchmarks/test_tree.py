"""Drawn trees: who is drawn where and how marked, the answer's colours, and well-formed files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.draft_records import Place, StepRecord
from benchmarks.tree import Piece, answer_pieces, answered, chosen_steps, draw, picture_of, title_of, tree_of
from service.assembly import Assembly
from service.engine.requests import SamplingParams
from service.errors import StartupError

Run = Callable[..., tuple[int, str]]

WORDS = {0: '" is"', 1: '" a"', 2: '" the"', 5: '" <b>"', 6: '"\\n"', 7: '" fox"'}
CANDIDATES = {(1,): 0.5, (2,): 0.3, (1, 5): 0.2, (1, 6): 0.25, (1, 6, 7): 0.1}
STEP = StepRecord(
    root=0,
    truth=(1, 6, 5, 2),
    accepted=2,
    candidates=CANDIDATES,
    proposals={"memory": {(2,): 0.3, (1,): 0.1}, "specblock": {path: 1.0 for path in CANDIDATES if path != (2,)}},
    places=[
        Place("specblock", 0, (), (1, 9)),
        Place("specblock", 0, (1,), (5, 6)),
        Place("specblock", 1, (1, 6), (7, 8)),
        Place("specblock", 1, (1,), (6, 5)),
    ],
    verified={path: odds for path, odds in CANDIDATES.items() if path != (1, 5)},
)
PICTURE: list[Piece] = [*tree_of(STEP, WORDS.__getitem__), ("first line\nsec", "bonus"), ("ond & last", "accepted")]


def test_the_text_shows_the_verified_tree_and_its_origins() -> None:
    assert list(tree_of(STEP, WORDS.__getitem__)) == [
        ('" is"\n', "accepted"),
        ('├─✓ " a"  0.50  memory and specblock, forward 1\n', "accepted"),
        ('│  └─✓ "\\n"  0.25  specblock, forward 1\n', "accepted"),
        ('│     └─  " fox"  0.10  specblock, forward 2\n', "rejected"),
        ('└─  " the"  0.30  memory\n', "rejected"),
    ]


def test_the_title_counts() -> None:
    words = 'step 3 of 9: 4 nodes verified, 2 accepted, then " <b>" from the target'
    assert title_of(STEP, 3, 9, WORDS.__getitem__) == words


def texts_of(picture: Sequence[Piece], file: Path) -> list[str]:
    """What the drawn page says, with spaces as they were."""
    draw(picture, file)
    elements = ElementTree.fromstring(file.read_text()).iter("{http://www.w3.org/2000/svg}text")
    return [str(element.text).replace("\N{NO-BREAK SPACE}", " ") for element in elements]


def test_the_page_shows_nodes_and_the_answer_on_their_grounds(tmp_path: Path) -> None:
    file = tmp_path / "tree.svg"
    texts = texts_of(PICTURE, file)
    assert {'" is"', '└─  " the"  0.30  memory', "first line", "sec", "ond & last"} <= set(texts)
    assert file.read_text().count("fill: #bbf7d0") == 4  # the root, two nodes and what the answer took over


def test_control_characters_do_not_break_the_page(tmp_path: Path) -> None:
    assert "a\ufffd\ufffd<\ufffd" in texts_of([("a\x00\x1b<\x07", "bonus")], tmp_path / "tree.svg")


def test_long_answers_are_cut_into_lines(tmp_path: Path) -> None:
    texts = texts_of([("word " * 100, "accepted")], tmp_path / "tree.svg")
    assert "".join(texts) == "word " * 100
    assert max(map(len, texts)) == 120


def test_pieces_follow_acceptance_and_never_split_a_character() -> None:
    steps = [
        StepRecord(root=0, truth=(10, 11), accepted=0),
        StepRecord(root=0, truth=(11, 12, 13), accepted=1),
        StepRecord(root=0, truth=(13, 14, 15), accepted=2),
    ]
    spelled = {10: b"a", 11: b"\xc3", 12: b"\xa9", 13: b"b", 14: b"c", 15: b"d"}

    def decode(tokens: Sequence[int]) -> str:
        return b"".join(spelled[token] for token in tokens).decode(errors="replace")

    assert answer_pieces(steps, 5, decode) == [("a\xe9", "bonus"), ("bc", "accepted")]


def test_steps_are_chosen_by_number_or_by_accepted_path() -> None:
    plain = StepRecord(root=0, truth=(1,), accepted=0)
    short = StepRecord(root=0, truth=(1, 2), accepted=1, verified={(1,): 1.0})
    steps = [plain, short, plain, STEP, short]
    assert chosen_steps(steps, first=None, count=1) == [3]
    assert chosen_steps(steps, first=1, count=2) == [1, 3]
    assert chosen_steps(steps, first=None, count=9) == [3, 4]
    with pytest.raises(StartupError, match="no step from step 6 on verified a draft tree"):
        chosen_steps(steps, first=6, count=1)
    with pytest.raises(StartupError, match="set budget_policy to fixed"):
        chosen_steps([plain], first=None, count=1)


def test_the_pieces_are_the_answer(trained_assembly: Assembly) -> None:
    prompt = trained_assembly.tokenizer.encode("the cat in the hat", add_special_tokens=True)
    sampling = SamplingParams(seed=1, max_tokens=40, temperature=0.0, skip_special_tokens=False)
    answer, steps = answered(trained_assembly, prompt, sampling)
    picture = picture_of(trained_assembly, answer, steps, [])
    shown = "".join(text for text, _ in picture[:-1])
    assert shown == trained_assembly.tokenizer.decode(answer.token_ids) == answer.text
    assert f"40 tokens in {len(steps)} steps" in picture[-1][0]


@pytest.mark.parametrize("suffix", [".txt", ".svg", ".png"])
def test_the_command_draws(
    run: Run, trained_assembly: Assembly, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: trained_assembly)
    file = tmp_path / f"tree{suffix}"
    prompt = "that the other the other the other"
    code, output = run("tree", "--prompt", prompt, "--max-tokens", 48, "--steps", 2, "--out", file)
    assert code == 0, output
    assert output.count("nodes verified") == 2
    if suffix == ".txt":
        assert output.splitlines() == file.read_text().splitlines()
    elif suffix == ".svg":
        assert ElementTree.fromstring(file.read_text()).tag.endswith("svg")
    else:
        assert file.read_bytes().startswith(b"\x89PNG")


def test_another_kind_of_file_is_refused_before_anything_is_loaded(run: Run, tmp_path: Path) -> None:
    for name, words in (("tree.pdf", "give a name that ends in .txt, .svg, .png"), ("no/tree.svg", "in a folder that")):
        with pytest.raises(StartupError, match=words):
            run("tree", "--prompt", "a", "--out", tmp_path / name)
