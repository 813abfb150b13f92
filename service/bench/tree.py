"""`adaptree tree`: draft trees with their words, who proposed each node, and the answer in coloured pieces."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape

from rich.console import Console
from rich.text import Text

from service.assembly import Assembly, assemble
from service.bench.conditions import refuse_unwritable
from service.bench.generate import Answer, generate
from service.bench.observe import StepRecord, TokenPath, observed
from service.bench.prompts import refuse_too_long
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import RequestError, StartupError

TokenText = Callable[[int], str]
PieceKind = Literal["accepted", "bonus"]


@dataclass(frozen=True, slots=True)
class DrawnNode:
    """A verified node and what hangs below it, likeliest first."""

    text: str
    survival: float
    origins: tuple[str, ...]  # sources, or forwards of a source, that proposed it
    accepted: bool
    children: tuple["DrawnNode", ...]


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """One step's tree."""

    title: str
    root: str
    children: tuple[DrawnNode, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the answer."""

    text: str
    kind: PieceKind  # bonus also stands for tokens of steps that drafted nothing: the target's own


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is drawn."""

    trees: tuple[DrawnTree, ...]
    pieces: tuple[Piece, ...]
    caption: str


def drawn_tree(step: StepRecord, title: str, text_of: TokenText) -> DrawnTree:
    """The verified nodes of a step as a tree."""
    children: dict[TokenPath, list[TokenPath]] = {}
    for path in step.verified:
        children.setdefault(path[:-1], []).append(path)

    def below(parent: TokenPath) -> tuple[DrawnNode, ...]:
        mine = sorted(children.get(parent, []), key=lambda path: (-step.candidates[path], path))
        return tuple(
            DrawnNode(
                text=quoted(text_of(path[-1])),
                survival=step.candidates[path],
                origins=origins_of(step, path),
                accepted=path == step.truth[: len(path)] and len(path) <= step.accepted,
                children=below(path),
            )
            for path in mine
        )

    return DrawnTree(title, quoted(text_of(step.root)), below(()))


def origins_of(step: StepRecord, path: TokenPath) -> tuple[str, ...]:
    """Who proposed a node; of a trained drafter's forwards the first that did."""
    forwards = [block.forward for block in step.blocks if path in block.paths()]
    named = [source for source, tree in step.proposals.items() if path in tree]
    trained = [f"{source}, forward {min(forwards) + 1}" for source in named if _has_blocks(source) and forwards]
    return (*(source for source in named if not _has_blocks(source)), *trained)


def tree_title(step: StepRecord, number: int, num_steps: int, text_of: TokenText) -> str:
    bonus = quoted(text_of(step.truth[step.accepted]))
    return (
        f"step {number} of {num_steps}: {len(step.verified)} nodes verified, {step.accepted} accepted, then {bonus} "
        "from the target"
    )


def answer_pieces(steps: Sequence[StepRecord], num_tokens: int, decode: Callable[[Sequence[int]], str]) -> list[Piece]:
    """The answer's tokens, neighbours of one kind together; a character that tokens share goes to the last of them."""
    kinds: list[tuple[int, PieceKind]] = [
        (token, "accepted" if place < step.accepted else "bonus")
        for step in steps
        for place, token in enumerate(step.emitted)
    ]
    pieces: list[Piece] = []
    tokens: list[int] = []
    shown = ""
    for token, kind in kinds[:num_tokens]:
        tokens.append(token)
        text = decode(tokens)
        if text.endswith("\ufffd") and len(tokens) < num_tokens:
            continue
        new, shown = text[len(shown) :], text
        if pieces and pieces[-1].kind == kind:
            pieces[-1] = Piece(pieces[-1].text + new, kind)
        else:
            pieces.append(Piece(new, kind))
    return pieces


def quoted(text: str) -> str:
    """A token's text with its spaces and line ends visible."""
    return json.dumps(text, ensure_ascii=False)


def _has_blocks(source: str) -> bool:
    return source == "specblock"


_STYLES = {"accepted": "bold green", "bonus": "yellow", "rejected": "dim", "title": "bold"}


def text_of(picture: Picture) -> Text:
    """Everything as one text; `.plain` is what goes to a file."""
    lines = Text()
    for tree in picture.trees:
        lines.append(f"{tree.title}\n", style=_STYLES["title"])
        for line, style in tree_lines(tree):
            lines.append(f"{line}\n", style=style)
        lines.append("\n")
    for piece in picture.pieces:
        lines.append(piece.text, style=_STYLES[piece.kind])
    return lines.append(f"\n\n{picture.caption}\n")


def tree_lines(tree: DrawnTree) -> Iterator[tuple[str, str]]:
    """Each line and its style, the root first."""
    yield tree.root, _STYLES["accepted"]
    for node, is_last in _with_last(tree.children):
        yield from _node_lines(node, "", is_last)


def _node_lines(node: DrawnNode, indent: str, is_last: bool) -> Iterator[tuple[str, str]]:
    mark = "✓" if node.accepted else " "
    branch = "└─" if is_last else "├─"
    words = f"{indent}{branch}{mark} {node.text}  {node.survival:.2f}  {' and '.join(node.origins)}"
    yield words, _STYLES["accepted" if node.accepted else "rejected"]
    for child, child_is_last in _with_last(node.children):
        yield from _node_lines(child, indent + ("   " if is_last else "│  "), child_is_last)


def _with_last(nodes: tuple[DrawnNode, ...]) -> Iterator[tuple[DrawnNode, bool]]:
    return ((node, place == len(nodes) - 1) for place, node in enumerate(nodes))


_MARGIN = 24.0
_COLUMN, _ROW = 168.0, 46.0
_BOX_WIDTH, _BOX_HEIGHT = 132.0, 36.0
_TEXT_SIZE, _SMALL = 13.0, 10.0
CHARACTER = 0.602
"""Width of a character of the fixed-width font, as a share of its size."""

_LINE = 22.0
_ANSWER_COLUMNS = 96
_INK, _FAINT, _ACCEPTED, _BONUS = "#1f2933", "#b8c1cc", "#15803d", "#fde68a"
_ACCEPTED_FILL, _MIXED = "#bbf7d0", "#e9d5ff"
_PALETTE = ("#dbeafe", "#ffedd5", "#fce7f3", "#ccfbf1", "#fef9c3", "#e5e7eb")


@dataclass(frozen=True, slots=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str
    stroke_width: float


@dataclass(frozen=True, slots=True)
class Line:
    x1: float
    y1: float
    x2: float
    y2: float
    stroke: str
    stroke_width: float


@dataclass(frozen=True, slots=True)
class Label:
    """Text whose baseline begins at (x, y), in a fixed-width font."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    bold: bool


Shape = Box | Line | Label


@dataclass(frozen=True, slots=True)
class Page:
    """Shapes in the order in which they are painted."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def lay_out(picture: Picture) -> Page:
    """The whole page: trees one below the other, the legend, the answer."""
    colours = _colours(picture.trees)
    shapes: list[Shape] = []
    y = _MARGIN
    for tree in picture.trees:
        shapes.append(Label(_MARGIN, y + _TEXT_SIZE, tree.title, _TEXT_SIZE, _INK, True))
        placed = _Placed(y + _LINE + 4, colours)
        placed.place_tree(tree)
        shapes += placed.shapes
        y = placed.bottom + _LINE
    legend, y = _legend(colours, y)
    answer, y = _answer(picture.pieces, y + _LINE)
    caption = Label(_MARGIN, y + _LINE, picture.caption, _SMALL, _INK, False)
    shapes += [*legend, *answer, caption]
    return Page(max(map(_right_edge, shapes)) + _MARGIN, y + _LINE + _MARGIN, tuple(shapes))


def origin_of(node: DrawnNode) -> str:
    """The words of the legend for a node."""
    return " and ".join(node.origins)


class _Placed:
    """Boxes of one tree: a column for each depth, a line for each leaf, parents level with their first child."""

    def __init__(self, top: float, colours: dict[str, str]) -> None:
        self.bottom = top
        self._lines: list[Line] = []
        self._boxes: list[Shape] = []
        self._colours = colours

    @property
    def shapes(self) -> list[Shape]:
        return [*sorted(self._lines, key=lambda line: line.stroke_width), *self._boxes]

    def place_tree(self, tree: DrawnTree) -> None:
        root = DrawnNode(tree.root, 1.0, (), True, tree.children)
        self._place(root, _MARGIN, "#ffffff", "root")

    def _place(self, node: DrawnNode, x: float, fill: str, note: str) -> float:
        """Place a node and everything below it; returns the height at which it stands."""
        y = self.bottom
        if not node.children:
            self.bottom += _ROW
        for child in node.children:
            colour = self._colours.get(origin_of(child), _PALETTE[-1])
            at = self._place(child, x + _COLUMN, colour, f"{child.survival:.2f}")
            self._lines.append(_edge(x, y, at, child.accepted))
        self._boxes += _boxed(node, x, y, fill, note)
        return y


def _edge(x: float, y: float, child_y: float, accepted: bool) -> Line:
    middle = _BOX_HEIGHT / 2
    stroke, width = (_ACCEPTED, 3.0) if accepted else (_FAINT, 1.2)
    return Line(x + _BOX_WIDTH, y + middle, x + _COLUMN, child_y + middle, stroke, width)


def _boxed(node: DrawnNode, x: float, y: float, fill: str, note: str) -> Iterator[Shape]:
    stroke, width = (_ACCEPTED, 2.5) if node.accepted else (_FAINT, 1.0)
    yield Box(x, y, _BOX_WIDTH, _BOX_HEIGHT, fill, stroke, width)
    fits = int((_BOX_WIDTH - 12) / (_TEXT_SIZE * CHARACTER))
    text = node.text if len(node.text) <= fits else node.text[: fits - 1] + "…"
    yield Label(x + 6, y + 16, text, _TEXT_SIZE, _INK, node.accepted)
    yield Label(x + 6, y + 30, note, _SMALL, _INK, False)


def _colours(trees: Sequence[DrawnTree]) -> dict[str, str]:
    """A colour for each origin, in the order of their names; all that several proposed share one."""
    single: set[str] = set()
    several: set[str] = set()
    waiting = [node for tree in trees for node in tree.children]
    while waiting:
        node = waiting.pop()
        (several if len(node.origins) > 1 else single).add(origin_of(node))
        waiting += node.children
    named = {name: _PALETTE[place % len(_PALETTE)] for place, name in enumerate(sorted(single))}
    return named | dict.fromkeys(sorted(several), _MIXED)


def _legend(colours: dict[str, str], y: float) -> tuple[list[Shape], float]:
    """Swatches with words, one below the other; returns where they end."""
    if not colours:
        return [], y
    shapes: list[Shape] = []
    for name, colour in colours.items():
        shapes.append(Box(_MARGIN, y, 14, 14, colour, _FAINT, 1.0))
        shapes.append(Label(_MARGIN + 22, y + 12, f"proposed by {name}", _SMALL, _INK, False))
        y += _LINE
    shapes.append(Box(_MARGIN, y, 14, 14, "#ffffff", _ACCEPTED, 2.5))
    shapes.append(Label(_MARGIN + 22, y + 12, "accepted; numbers are survival", _SMALL, _INK, False))
    return shapes, y + _LINE


def _answer(pieces: Sequence[Piece], y: float) -> tuple[list[Shape], float]:
    """The answer in lines of equal width, the target's own tokens on yellow, accepted ones on green."""
    shapes: list[Shape] = []
    step, column = _TEXT_SIZE * CHARACTER, 0
    for piece in pieces:
        fill = _ACCEPTED_FILL if piece.kind == "accepted" else _BONUS
        for part in _parts(piece.text, column):
            if part == "\n":
                y, column = y + _LINE, 0
                continue
            x = _MARGIN + column * step
            shapes.append(Box(x, y, len(part) * step, _LINE - 4, fill, "none", 0.0))
            shapes.append(Label(x, y + 13, part, _TEXT_SIZE, _INK, False))
            column += len(part)
    return shapes, y + _LINE


def _parts(text: str, column: int) -> Iterator[str]:
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


def _right_edge(shape: Shape) -> float:
    if isinstance(shape, Box):
        return shape.x + shape.width
    if isinstance(shape, Line):
        return max(shape.x1, shape.x2)
    return shape.x + len(shape.text) * shape.size * CHARACTER


_PIXELS_PER_INCH = 100
_POINTS_PER_PIXEL = 72 / _PIXELS_PER_INCH
_PNG_SCALE = 2
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in range(32)}


def svg_of(page: Page) -> str:
    """The page as an SVG document."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{page.width:.0f}" height="{page.height:.0f}" '
        f'viewBox="0 0 {page.width:.0f} {page.height:.0f}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">'
    )
    background = f'<rect width="{page.width:.0f}" height="{page.height:.0f}" fill="#ffffff"/>'
    return "\n".join([head, background, *map(_svg_shape, page.shapes), "</svg>", ""])


def refuse_png_without_matplotlib() -> None:
    """Raise StartupError where PNG cannot be painted."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("a .png needs matplotlib, which is not installed: install it, or write .svg or .txt")


def write_png(page: Page, file: Path) -> None:
    """Paint the page with matplotlib, which must be there."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(page.width / _PIXELS_PER_INCH, page.height / _PIXELS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, page.width)
    axes.set_ylim(page.height, 0)
    axes.axis("off")
    for shape in page.shapes:
        _paint(axes, shape)
    figure.savefig(file, dpi=_PNG_SCALE * _PIXELS_PER_INCH)


def _svg_shape(shape: Shape) -> str:
    if isinstance(shape, Box):
        return f'<rect {_attributes(shape)} rx="4"/>'
    if isinstance(shape, Line):
        return f"<line {_attributes(shape)}/>"
    weight = ' font-weight="bold"' if shape.bold else ""
    width = len(shape.text) * shape.size * CHARACTER
    # Spaces between tokens must stay, and the text must be as wide as the box behind it whatever the font.
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.colour}"{weight} '
        f'textLength="{width:.1f}" xml:space="preserve">{_printable(shape.text)}</text>'
    )


def _attributes(shape: Box | Line) -> str:
    return " ".join(f'{name}="{value}"' for name, value in _named(shape))


def _named(shape: Box | Line) -> Iterator[tuple[str, str]]:
    for name in shape.__slots__:
        value = getattr(shape, name)
        yield name.replace("_", "-"), f"{value:.1f}" if isinstance(value, float) else str(value)


def _printable(text: str) -> str:
    """XML knows no control characters."""
    return escape(text.translate(_CONTROL))


def _paint(axes: Any, shape: Shape) -> None:
    patches: Any = importlib.import_module("matplotlib.patches")
    if isinstance(shape, Box):
        corner, size = (shape.x, shape.y), (shape.width, shape.height)
        width = shape.stroke_width * _POINTS_PER_PIXEL
        axes.add_patch(patches.Rectangle(corner, *size, facecolor=shape.fill, edgecolor=shape.stroke, linewidth=width))
    elif isinstance(shape, Line):
        width = shape.stroke_width * _POINTS_PER_PIXEL
        axes.plot([shape.x1, shape.x2], [shape.y1, shape.y2], color=shape.stroke, linewidth=width, zorder=0.5)
    else:
        _paint_label(axes, shape)


def _paint_label(axes: Any, label: Label) -> None:
    axes.text(
        label.x,
        label.y,
        label.text.replace("$", r"\$"),
        family="monospace",
        fontsize=label.size * _POINTS_PER_PIXEL,
        color=label.colour,
        fontweight="bold" if label.bold else "normal",
        verticalalignment="baseline",
    )


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
    write = _writer(out)
    assembly = assemble(config)
    answer, steps = answered(assembly, question)
    picture = picture_of(assembly, answer, steps, first=first, count=count)
    Console(soft_wrap=True, highlight=False).print(text_of(picture), end="")
    write(picture)


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


def _writer(out: Path | None) -> Callable[[Picture], None]:
    """How the file is written, decided by its name before anything is loaded."""
    if out is None:
        return lambda picture: None

    def text(picture: Picture) -> None:
        out.write_text(text_of(picture).plain, encoding="utf-8")

    def svg(picture: Picture) -> None:
        out.write_text(svg_of(lay_out(picture)), encoding="utf-8")

    def png(picture: Picture) -> None:
        write_png(lay_out(picture), out)

    writers: Mapping[str, Callable[[Picture], None]] = {".txt": text, ".svg": svg, ".png": png}
    if out.suffix not in writers:
        raise StartupError(f"--out {out}: give a name that ends in {', '.join(writers)}")
    if out.suffix == ".png":
        refuse_png_without_matplotlib()
    return writers[out.suffix]


def _tokens(assembly: Assembly, question: Question) -> list[int]:
    if question.is_raw:
        return assembly.tokenizer.encode(question.prompt, add_special_tokens=True)
    try:
        return assembly.tokenizer.render_chat([{"role": "user", "content": question.prompt}])
    except RequestError as error:
        raise StartupError(f"--prompt: {error.message} Give --raw to continue the text as it is.") from error
