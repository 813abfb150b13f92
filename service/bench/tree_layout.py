"""Where things stand on the page: a picture as boxes, lines and labels, in pixels, y downwards.

Every painter paints the same shapes; none of them decides anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.bench.tree_picture import DrawnNode, DrawnTree, Picture, Piece

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
