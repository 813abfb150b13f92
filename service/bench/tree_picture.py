"""What `adaptree tree` draws: draft trees with their words, who proposed each node, and the answer in coloured pieces;
and the same as lines of text.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.text import Text

from service.bench.observe import StepRecord, TokenPath

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

    @property
    def origin(self) -> str:
        return " and ".join(self.origins)


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
    words = f"{indent}{branch}{mark} {node.text}  {node.survival:.2f}  {node.origin}"
    yield words, _STYLES["accepted" if node.accepted else "rejected"]
    for child, child_is_last in _with_last(node.children):
        yield from _node_lines(child, indent + ("   " if is_last else "│  "), child_is_last)


def _with_last(nodes: tuple[DrawnNode, ...]) -> Iterator[tuple[DrawnNode, bool]]:
    return ((node, place == len(nodes) - 1) for place, node in enumerate(nodes))
