"""A picture as lines of text: indented trees, the accepted path marked, and the answer.

The same lines go to a file without colours and to a terminal with them.
"""

from collections.abc import Iterator

from rich.text import Text

from service.bench.tree_picture import DrawnNode, DrawnTree, Picture

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
