"""The course of a training run: one line of JSON per evaluation, and a picture of it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.figure import Figure

from drafters.training.fit import StepReport
from drafters.training.scores import Scores

CURVE_FILE = "curve.jsonl"
PICTURE_FILE = "curve.png"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One evaluation."""

    step: int
    tokens: int
    seconds: float
    train_loss: float | None  # mean since the evaluation before; None before the first step
    gradient_norm: float | None
    learning_rate: float | None
    skipped_steps: int
    scores: Scores

    @staticmethod
    def of(reports: Sequence[StepReport], scores: Scores) -> "CurvePoint":
        """After these steps."""
        last = reports[-1]
        return CurvePoint(
            step=last.position.step,
            tokens=last.position.tokens,
            seconds=round(last.position.seconds, 1),
            train_loss=sum(report.loss for report in reports) / len(reports),
            gradient_norm=last.gradient_norm,
            learning_rate=last.learning_rate,
            skipped_steps=last.position.skipped,
            scores=scores,
        )

    @staticmethod
    def at_start(scores: Scores) -> "CurvePoint":
        return CurvePoint(0, 0, 0.0, None, None, None, 0, scores)


class Curve:
    """The points so far, in the file and at hand."""

    def __init__(self, folder: Path, *, up_to_step: int) -> None:
        """Points after `up_to_step` belong to steps that a kill undid."""
        self._file = folder / CURVE_FILE
        self._picture = folder / PICTURE_FILE
        self.points = [point for point in _read(self._file) if point.step <= up_to_step] if up_to_step else []
        self._file.write_text("".join(_line(point) for point in self.points))

    def add(self, point: CurvePoint) -> None:
        self.points.append(point)
        with self._file.open("a") as stream:
            stream.write(_line(point))
        _draw(self.points, self._picture)


def _line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"


def _read(file: Path) -> list[CurvePoint]:
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [CurvePoint(**{**line, "scores": _scores(line["scores"])}) for line in lines]


def _scores(values: dict[str, object]) -> Scores:
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Scores(**lists)  # type: ignore[arg-type]


def _draw(points: Sequence[CurvePoint], picture: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, shares, taus = figure.subplots(1, 3)
    tokens = [point.tokens / 1e6 for point in points]
    losses.plot(tokens, [point.scores.loss for point in points], marker=".", label="held-out texts")
    trained = [point for point in points if point.train_loss is not None]
    losses.plot([p.tokens / 1e6 for p in trained], [p.train_loss or 0.0 for p in trained], label="training texts")
    losses.set_title("cross-entropy to the target")
    for place in range(min(4, len(points[0].scores.alpha))):
        values = [point.scores.alpha[place] for point in points]
        shares.plot(tokens, [float("nan") if v is None else v for v in values], marker=".", label=f"place {place + 1}")
    covered = [point.scores.covered[0] or 0.0 for point in points]
    shares.plot(tokens, covered, linestyle="--", label="place 1, ranks 1-4")
    shares.set_title("alpha: likeliest token is the target's")
    taus.plot(tokens, [point.scores.chain_tau for point in points], marker=".", label="chain of two blocks")
    taus.plot(tokens, [point.scores.tree_tau for point in points], marker=".", label="tree of 16 nodes")
    taus.set_title("tau, replayed")
    for axes in (losses, shares, taus):
        axes.set_xlabel("million training tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=110)
