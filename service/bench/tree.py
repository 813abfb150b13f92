"""`adaptree tree`: answer a prompt under observation, choose the steps to draw, print and write them.

A drawn page has a column for each depth and a line for each leaf, parents level with their first child.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console

from service.assembly import Assembly, assemble
from service.bench.conditions import refuse_unwritable
from service.bench.driver import Answer, generate
from service.bench.observe import StepRecord, observed
from service.bench.tree_picture import (
    DrawnNode,
    DrawnTree,
    Picture,
    Piece,
    answer_pieces,
    drawn_tree,
    text_of,
    tree_title,
)
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError
from service.prompts import refuse_too_long

SUFFIXES = (".txt", ".svg", ".png")

_PIXELS_PER_INCH = 100
_POINTS = 72 / _PIXELS_PER_INCH  # of a pixel
_MARGIN = 24.0
_COLUMN, _ROW = 168.0, 46.0
_BOX_WIDTH, _BOX_HEIGHT = 132.0, 36.0
_TEXT_SIZE, _SMALL = 13.0, 10.0
_CHARACTER = 0.602
"""Width of a character of the fixed-width font, as a share of its size."""

_LINE = 22.0
_ANSWER_COLUMNS = 96
_INK, _FAINT, _ACCEPTED, _BONUS = "#1f2933", "#b8c1cc", "#15803d", "#fde68a"
_ACCEPTED_FILL, _MIXED = "#bbf7d0", "#e9d5ff"
_PALETTE = ("#dbeafe", "#ffedd5", "#fce7f3", "#ccfbf1", "#fef9c3", "#e5e7eb")
# XML knows no control characters, and viewers join spaces.
_PRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32)} | {ord(" "): "\N{NO-BREAK SPACE}"}


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how."""

    prompt: str
    is_raw: bool  # continue the text as it is, without the chat template
    temperature: float
    max_tokens: int
    seed: int


def run_tree(config: ServiceConfig, question: Question, *, first: int | None, count: int, out: Path | None) -> None:
    """Draw `count` trees from step `first` on; unset, from the step with the longest accepted path on."""
    refuse_unwritable(out)
    if out is not None and out.suffix not in SUFFIXES:
        raise StartupError(f"--out {out}: give a name that ends in {', '.join(SUFFIXES)}")
    assembly = assemble(config)
    answer, steps = answered(assembly, question)
    picture = picture_of(assembly, answer, steps, first=first, count=count)
    Console(soft_wrap=True, highlight=False).print(text_of(picture), end="")
    if out is not None and out.suffix == ".txt":
        out.write_text(text_of(picture).plain, encoding="utf-8")
    elif out is not None:
        draw(picture, out)


def answered(assembly: Assembly, question: Question) -> tuple[Answer, list[StepRecord]]:
    """The answer and its steps. Raises StartupError for a prompt that cannot be read or leaves no room."""
    prompt = _tokens(assembly, question)
    refuse_too_long([prompt], question.max_tokens, assembly.limits.max_model_len, "--prompt")
    sampling = SamplingParams(
        seed=question.seed, max_tokens=question.max_tokens, temperature=question.temperature, skip_special_tokens=False
    )
    with observed(assembly, assembly.drafter_name, assembly.weights) as seen:
        engine = assembly.engine(drafter=seen.drafter)
        run = generate(engine, [GenerationRequest(request_id="prompt", prompt=prompt, sampling=sampling)])
        return run.answers[0], seen.recorder.take()


def picture_of(
    assembly: Assembly, answer: Answer, steps: Sequence[StepRecord], *, first: int | None, count: int
) -> Picture:
    """The trees of the chosen steps, and the whole answer."""

    def text(token: int) -> str:
        return assembly.tokenizer.decode([token])

    chosen = chosen_steps(steps, first=first, count=count)
    accepted = sum(step.accepted for step in steps)
    pieces = answer_pieces(steps, len(answer.token_ids), assembly.tokenizer.decode)
    return Picture(
        trees=tuple(drawn_tree(steps[n], tree_title(steps[n], n + 1, len(steps), text), text) for n in chosen),
        pieces=tuple(pieces),
        caption=(
            f"green: accepted drafts, yellow: the target's own tokens; {len(answer.token_ids)} tokens in "
            f"{len(steps)} steps, {accepted} accepted, {1 + accepted / len(steps):.2f} a step; "
            f"drafter {assembly.drafter_name}"
        ),
    )


def chosen_steps(steps: Sequence[StepRecord], *, first: int | None, count: int) -> list[int]:
    """Numbers (from 0) of the steps to draw; only those that verified a tree. `first` counts from 1."""
    with_trees = [number for number, step in enumerate(steps) if step.verified]
    if first is None and with_trees:
        first = 1 + max(with_trees, key=lambda number: steps[number].accepted)
    chosen = [number for number in with_trees if first is not None and number + 1 >= first][:count]
    if not chosen:
        place = f"from step {first} on " if first is not None else ""
        raise StartupError(
            f"no step {place}verified a draft tree ({len(steps)} steps): drafting did not pay here; "
            "set budget_policy to fixed to verify trees all the same, or ask for more tokens"
        )
    return chosen


def _tokens(assembly: Assembly, question: Question) -> list[int]:
    if question.is_raw:
        return assembly.tokenizer.encode(question.prompt, add_special_tokens=True)
    try:
        return assembly.tokenizer.render_chat([{"role": "user", "content": question.prompt}])
    except RequestError as error:
        raise StartupError(f"--prompt: {error.message} Give --raw to continue the text as it is.") from error


def draw(picture: Picture, file: Path) -> None:
    """The whole page as .svg or .png: trees one below the other, the legend, the answer."""
    page, y = _Page(_colours(picture.trees)), _MARGIN
    for tree in picture.trees:
        page.label(_MARGIN, y + _TEXT_SIZE, tree.title, bold=True)
        y = page.tree(tree, y + _LINE + 4) + _LINE
    y = page.legend(y)
    y = page.answer(picture.pieces, y + _LINE)
    page.label(_MARGIN, y + _LINE, picture.caption, size=_SMALL)
    page.save(file, y + _LINE + _MARGIN)


class _Page:
    """A page that grows with what is drawn on it, in pixels from its upper left corner."""

    def __init__(self, colours: dict[str, str]) -> None:
        self._colours = colours
        self._figure = Figure()
        self._axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.axis("off")
        self._width = 0.0

    def save(self, file: Path, height: float) -> None:
        width = self._width + _MARGIN
        self._figure.set_size_inches(width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(height, 0)
        with matplotlib.rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a character that the font lacks is drawn as a box
            self._figure.savefig(file, dpi=2 * _PIXELS_PER_INCH)

    def label(self, x: float, y: float, text: str, *, size: float = _TEXT_SIZE, bold: bool = False) -> None:
        """Text whose baseline begins at (x, y)."""
        self._width = max(self._width, x + len(text) * size * _CHARACTER)
        self._axes.text(
            x,
            y,
            text.translate(_PRINTABLE),
            family="monospace",
            fontsize=size * _POINTS,
            color=_INK,
            fontweight="bold" if bold else "normal",
            parse_math=False,
        )

    def tree(self, tree: DrawnTree, top: float) -> float:
        """Boxes and edges of a tree; returns where they end."""
        root = DrawnNode(tree.root, 1.0, (), True, tree.children)
        return self._node(root, _MARGIN, top, "#ffffff", "root")

    def legend(self, y: float) -> float:
        """Swatches with words, one below the other; returns where they end."""
        if not self._colours:
            return y
        entries = [(colour, _FAINT, 1.0, f"proposed by {name}") for name, colour in self._colours.items()]
        for fill, stroke, width, words in [*entries, ("#ffffff", _ACCEPTED, 2.5, "accepted; numbers are survival")]:
            self._box(_MARGIN, y, 14, 14, fill, stroke, width)
            self.label(_MARGIN + 22, y + 12, words, size=_SMALL)
            y += _LINE
        return y

    def answer(self, pieces: Sequence[Piece], y: float) -> float:
        """Lines of equal width, the target's own tokens on yellow, accepted ones on green; returns where they end."""
        step, column = _TEXT_SIZE * _CHARACTER, 0
        for piece in pieces:
            fill = _ACCEPTED_FILL if piece.kind == "accepted" else _BONUS
            for part in cut_lines(piece.text, column):
                if part == "\n":
                    y, column = y + _LINE, 0
                    continue
                x = _MARGIN + column * step
                self._box(x, y, len(part) * step, _LINE - 4, fill, "none", 0.0)
                self.label(x, y + 13, part)
                column += len(part)
        return y + _LINE

    def _node(self, node: DrawnNode, x: float, y: float, fill: str, note: str) -> float:
        """A node and everything below it; returns where they end."""
        self._box(x, y, _BOX_WIDTH, _BOX_HEIGHT, fill, *((_ACCEPTED, 2.5) if node.accepted else (_FAINT, 1.0)))
        fits = int((_BOX_WIDTH - 12) / (_TEXT_SIZE * _CHARACTER))
        text = node.text if len(node.text) <= fits else node.text[: fits - 1] + "…"
        self.label(x + 6, y + 16, text, bold=node.accepted)
        self.label(x + 6, y + 30, note, size=_SMALL)
        bottom, middle = y, y + _BOX_HEIGHT / 2
        for child in node.children:
            stroke, width = (_ACCEPTED, 3.0) if child.accepted else (_FAINT, 1.2)
            ends = [x + _BOX_WIDTH, x + _COLUMN], [middle, bottom + _BOX_HEIGHT / 2]
            self._axes.plot(*ends, color=stroke, linewidth=width * _POINTS, zorder=width / 10)  # below boxes
            fill = self._colours.get(child.origin, _PALETTE[-1])
            bottom = self._node(child, x + _COLUMN, bottom, fill, f"{child.survival:.2f}")
        return bottom if node.children else y + _ROW

    def _box(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str, stroke_width: float
    ) -> None:
        self._width = max(self._width, x + width)
        stroke_width *= _POINTS
        self._axes.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=stroke, linewidth=stroke_width))


def _colours(trees: Sequence[DrawnTree]) -> dict[str, str]:
    """A colour for each origin, in the order of their names; all that several proposed share one."""
    single: set[str] = set()
    several: set[str] = set()
    waiting = [node for tree in trees for node in tree.children]
    while waiting:
        node = waiting.pop()
        (several if len(node.origins) > 1 else single).add(node.origin)
        waiting += node.children
    named = {name: _PALETTE[place % len(_PALETTE)] for place, name in enumerate(sorted(single))}
    return named | dict.fromkeys(sorted(several), _MIXED)


def cut_lines(text: str, column: int) -> Iterator[str]:
    """Stretches that fit on a line, and "\\n" where a new line begins."""
    for number, line in enumerate(text.split("\n")):
        if number:
            yield "\n"
            column = 0
        while line:
            if column >= _ANSWER_COLUMNS:
                yield "\n"
                column = 0
            part, line = line[: _ANSWER_COLUMNS - column], line[_ANSWER_COLUMNS - column :]
            column += len(part)
            yield part
