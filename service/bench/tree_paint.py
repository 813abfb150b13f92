"""Paints a page as SVG, with nothing but text, or as PNG where matplotlib is installed.

Knows shapes only.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from service.bench.tree_layout import CHARACTER, Box, Label, Line, Page, Shape
from service.errors import StartupError

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
