"""Reports of a training run: its curve, the facts in the drafter's config, and the model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from drafters.network import checkpoint
from drafters.training.fit import FitReport, Position
from drafters.training.replay import TREE_NODES, HeldOutScores
from service import __version__
from service.conditions import surroundings
from service.learning.features import Manifest
from service.logging import say

CURVE_FILE = "curve.jsonl"

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
            f"distance {scores.total_variation or 0.0:.3f}, tau {scores.tree_tau:.2f}"
        )


class Curve:
    """The evaluations so far: logged, and appended to a file of JSON lines."""

    def __init__(self, folder: Path, *, up_to_step: int) -> None:
        """Drop points after `up_to_step`: their steps were lost by a kill."""
        self._file = folder / CURVE_FILE
        self.points = [point for point in _read_points(self._file) if point.step <= up_to_step] if up_to_step else []
        self._file.write_text("".join(_point_line(point) for point in self.points))

    def add(self, point: CurvePoint) -> None:
        """Add an evaluation."""
        self.points.append(point)
        with self._file.open("a") as stream:
            stream.write(_point_line(point))
        say(str(point))


def _point_line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"


def _read_points(file: Path) -> list[CurvePoint]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [TypeAdapter(CurvePoint).validate_json(line) for line in lines if line.endswith("}")]


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
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "processes": num_processes,
        "adaptree": __version__,
        **surroundings(),
    }


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the model card: the main facts, and the sources of the prompts, from which their licences follow."""
    data, training = facts["data"], facts["training"]
    weights_bytes = (folder / checkpoint.WEIGHTS_FILE).stat().st_size
    shape = f"{training['num_layers']} layers, blocks of {training['block_size']}"
    rows = {
        "weights": f"{weights_bytes / 1e6:.1f} MB, bf16; {training['draft_vocab_size']} draft tokens, {shape}",
        "trained on": f"{data['response_tokens']:,} response tokens of the target; {training['tokens_seen']:,} seen",
        "cost": f"{training['minutes']} minutes, {training['steps']} steps ({training['skipped_steps']} skipped)",
        "machine": f"{facts['machine']}, device {facts['device']}, processes: {facts['processes']}",
        "left out of the method": ", ".join(training["without"]) or "nothing",
        "held-out texts, at the start": _shown(facts["scores_at_start"]),
        "held-out texts, now": _shown(facts["scores"]),
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("adaptree", "torch", "transformers")),
        "command": f"`{facts['command']}`",
        "commit, date": f"{facts['commit']}, {facts['date']}",
    }
    (folder / checkpoint.CARD_FILE).write_text(f"""# A drafter of kind {training["kind"]} for {facts["target"]}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text.

{_table("", rows, "")}

The course of training is in {CURVE_FILE}, all facts are in {checkpoint.CONFIG_FILE}.

## Data

{_table("source of the prompts", data["responses_by_source"], "responses")}

The prompts' licences follow from their sources; the responses are the target's own.
""")


def _shown(scores: Mapping[str, Any]) -> str:
    tau = f"{scores['tree_tau']:.2f} tokens per verify in trees of {TREE_NODES} nodes"
    return f"cross-entropy {scores['loss']:.3f}; {tau}"


def _table(name: str, values: Mapping[str, object], title: str) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
    return f"| {name} | {title} |\n|---|---|\n{rows}"
