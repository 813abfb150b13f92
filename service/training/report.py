"""Reports of a training run: its curve, the facts in the drafter's config, and the model card."""

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter

from drafters.network import checkpoint
from drafters.training.fit import FitReport, Position
from drafters.training.scores import HeldOutScores
from service import __version__
from service.conditions import CHECKOUT, command_line, commit_of
from service.engine.measuring import processor_name
from service.logging import say
from service.training.features import Manifest

CURVE_FILE = "curve.jsonl"
PICTURE_FILE = "curve.png"

_COUNTS = ("responses_by_source", "responses_by_task", "responses_by_temperature")
_DATA = ("files", *_COUNTS, "response_tokens", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One evaluation; the training fields are None before the first step."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float | None = None  # mean since the evaluation before
    gradient_norm: float | None = None
    learning_rate: float | None = None
    skipped_steps: int = 0
    scores: HeldOutScores

    @staticmethod
    def of(reports: Sequence[FitReport], scores: HeldOutScores) -> "CurvePoint":
        """The evaluation after these steps."""
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

    def __str__(self) -> str:
        scores = self.scores
        alphas = " ".join("-" if alpha is None else f"{alpha:.2f}" for alpha in scores.alpha[:4])
        return (
            f"step {self.step}, {self.tokens / 1e6:.2f}M tokens, {self.seconds / 60:.1f} min: loss {scores.loss:.3f}, "
            f"alpha {alphas}, ranks 1-4 {scores.covered[0] or 0.0:.2f}, "
            f"distance {scores.total_variation or 0.0:.3f}, tau chain {scores.chain_tau:.2f} tree {scores.tree_tau:.2f}"
        )


class Curve:
    """The evaluations so far: logged, appended to a file of JSON lines, and drawn if matplotlib is installed."""

    def __init__(self, folder: Path, *, up_to_step: int) -> None:
        """Drop points after `up_to_step`: their steps were lost by a kill."""
        self._file = folder / CURVE_FILE
        self._picture = folder / PICTURE_FILE
        self.points = [point for point in _read_points(self._file) if point.step <= up_to_step] if up_to_step else []
        self._file.write_text("".join(_point_line(point) for point in self.points))

    def add(self, point: CurvePoint) -> None:
        """Add an evaluation."""
        self.points.append(point)
        with self._file.open("a") as stream:
            stream.write(_point_line(point))
        _draw(self.points, self._picture)
        say(str(point))


def _point_line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"


def _read_points(file: Path) -> list[CurvePoint]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [TypeAdapter(CurvePoint).validate_json(line) for line in lines if line.endswith("}")]


def _draw(points: Sequence[CurvePoint], picture: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        if len(points) == 1:
            say(f"no {picture.name}: install `adaptree[plots]` for matplotlib; the numbers are in {CURVE_FILE}")
        return
    scores = [point.scores for point in points]
    panels: dict[str, dict[str, Sequence[float | None]]] = {
        "distance to the target": {
            "held-out texts, cross-entropy": [one.loss for one in scores],
            "held-out texts, total variation": [one.total_variation for one in scores],
            "training texts, as trained": [point.train_loss for point in points],
        },
        "alpha: likeliest token is the target's": {
            **{f"depth {depth + 1}": [one.alpha[depth] for one in scores] for depth in range(len(scores[0].alpha[:4]))},
            "depth 1, ranks 1-4": [one.covered[0] for one in scores],
        },
        "tau, replayed": {
            "chain": [one.chain_tau for one in scores],
            "tree of 16 nodes": [one.tree_tau for one in scores],
        },
    }
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for label, values in curves.items():
            numbers = [math.nan if value is None else value for value in values]
            axes.plot([point.tokens / 1e6 for point in points], numbers, marker=".", label=label)
        axes.set(title=title, xlabel="million training tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def facts_of(
    manifest: Manifest,
    position: Position,
    points: Sequence[CurvePoint],
    *,
    training: Mapping[str, Any],
    device: torch.device,
    num_processes: int,
) -> dict[str, Any]:
    """Provenance and scores of the weights as JSON values."""
    return {
        "target": manifest.target,
        "data": {name: getattr(manifest, name) for name in _DATA},
        "training": {
            **training,
            "steps": position.step,
            "skipped_steps": position.skipped,
            "epochs": position.epoch,
            "tokens_seen": position.tokens,
            "minutes": round(position.seconds / 60, 1),
        },
        "scores": asdict(points[-1].scores),
        "scores_at_start": asdict(points[0].scores),
        "machine": {
            "processor": processor_name(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": num_processes,
        },
        "versions": {"adaptree": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit_of(CHECKOUT),
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the model card."""
    weights_bytes = (folder / checkpoint.WEIGHTS_FILE).stat().st_size
    data, training, machine = facts["data"], facts["training"], facts["machine"]
    shape = f"{training['draft_vocab_size']} draft tokens, {training['num_layers']} layers"
    shape += f", blocks of {training['block_size']}"
    processes = "1 process" if machine["processes"] == 1 else f"{machine['processes']} processes"
    without = ", ".join(training["without"]) or "nothing"
    picture = f"![training curve]({PICTURE_FILE})" if (folder / PICTURE_FILE).exists() else f"Curve: {CURVE_FILE}"
    card = f"""# A drafter of kind {training["kind"]} for {facts["target"]}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text.

| | |
|---|---|
| weights | {weights_bytes / 1e6:.1f} MB, bf16; {shape} |
| trained on | {data["response_tokens"]:,} response tokens of the target itself; {training["tokens_seen"]:,} seen |
| cost | {training["minutes"]} minutes, {training["steps"]} steps ({training["skipped_steps"]} skipped) |
| machine | {machine["processor"]}, device {machine["device"]}, {machine["threads"]} threads, {processes} |
| trained to lower | {training["loss"]} |
| left out of the method | {without} |
| versions | {", ".join(f"{name} {version}" for name, version in facts["versions"].items())} |
| command | `{facts["command"]}` |
| commit, date | {facts["commit"]}, {facts["date"]} |

## Scores on held-out texts

| | at start | now |
|---|---:|---:|
{_score_rows(facts["scores_at_start"], facts["scores"])}

alpha: share of positions whose likeliest draft token is the target's. tau: tokens per verify when the recorded texts
are replayed. Depths beyond the first count only where all tokens before could have been drafted.

{picture}

## Data

{_table("source of the prompts", data["responses_by_source"])}

{_table("temperature", data["responses_by_temperature"])}

{_table("file", data["files"], "SHA-256")}

The prompts' licences follow from their sources; the responses are the target's own.
"""
    (folder / checkpoint.CARD_FILE).write_text(card)


def _score_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    rows = [(f"alpha at depth {depth + 1}", "alpha", depth) for depth in range(len(now["alpha"]))]
    rows.insert(1, ("ranks 1-4 at depth 1", "covered", 0))
    lines = [f"| {title} | {_shown(before[name][at])} | {_shown(now[name][at])} |" for title, name, at in rows]
    plain = {"tau, chain": "chain_tau", "tau, tree of 16 nodes": "tree_tau", "cross-entropy": "loss"}
    plain["total variation to the target"] = "total_variation"
    lines += [f"| {title} | {_shown(before[name])} | {_shown(now[name])} |" for title, name in plain.items()]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(name: str, values: Mapping[str, object], title: str = "responses") -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
    return f"| {name} | {title} |\n|---|---:|\n{rows}"
