"""The training loop, its learning curve, and the file from which an interrupted run resumes. The order of batches is
determined by seed and epoch, the random numbers of a step by seed, step and rank. So a resumed run has the same results
as an uninterrupted one, without storing the state of a generator."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from drafters.files import replacing
from drafters.training.corpus import Batch, Example, TrainingError, batches
from drafters.training.objective import StepScores
from drafters.training.parallel import Ranks
from drafters.training.replay import HeldOutScores

_PRODUCT_ROWS, _PRODUCT_INPUTS, _PRODUCT_OUTPUTS = 256, 512, 1024  # a matrix product that takes some milliseconds
_PRODUCT_TRIALS = 5
CURVE_FILE = "curve.jsonl"

_MOST_SKIPPED = 25
_EPOCHS_APART = 1_000_003
_STEPS_APART = 7_919


@dataclass(frozen=True, slots=True)
class Length:
    """Length of a run, which ends after `steps` or `seconds`, whichever comes first. At least one must be set."""

    steps: int | None = None
    seconds: float | None = None

    def fraction(self, steps: int, seconds: float) -> float:
        """Return the share of the run, 0 to 1, that is over after these steps and seconds."""
        parts = [steps / self.steps] if self.steps is not None else []
        parts += [seconds / self.seconds if self.seconds else 1.0] if self.seconds is not None else []
        return min(1.0, max(parts))


def rate_factor(step: int, fraction: float, *, warm_up_steps: int, least: float) -> float:
    """Return the factor of the learning rate at a step, counted from 0: linear warm-up, then cosine decay to
    `least`."""
    rising = min(1.0, (step + 1) / max(1, warm_up_steps))
    return rising * (least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * fraction)))


@dataclass(frozen=True, slots=True)
class Position:
    """Progress of a run, from which it can resume."""

    step: int = 0
    epoch: int = 0
    place: int = 0  # batches of this epoch that each process has done
    tokens: int = 0
    skipped: int = 0  # steps without an update, because a gradient was not finite
    skipped_in_a_row: int = 0
    seconds: float = 0.0


def save_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    *,
    described: Mapping[str, Any],
    notes: Mapping[str, Any],
) -> None:
    """Write a run to the file that `SavedRun.read` reads. `described`: settings that a resumed run must have; `notes`:
    facts to keep; both plain JSON values."""
    content = {
        "model": model.state_dict(),
        "d2t": model.get_buffer("d2t"),
        "optimizer": optimizer.state_dict(),
        "position": asdict(position),
        "described": dict(described),
        "notes": dict(notes),
    }
    with replacing(path) as unfinished:
        torch.save(content, unfinished)


@dataclass(frozen=True, slots=True)
class SavedRun:
    """An interrupted run, as written by `save_state`."""

    path: Path
    d2t: Tensor  # [draft_vocab] int64, target ids of draft tokens, which a resumed run keeps
    notes: Mapping[str, Any]
    _described: Mapping[str, Any]
    _position: Mapping[str, Any]
    _states: tuple[Mapping[str, Any], dict[str, Any]]  # state dicts of model and optimizer

    @staticmethod
    def read(path: Path) -> "SavedRun":
        """Read a saved run. Raises TrainingError if the file cannot be read."""
        try:
            content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            raise TrainingError(f"{path} cannot be read ({error}); delete it to start the run anew") from error
        states = content["model"], content["optimizer"]
        return SavedRun(path, content["d2t"], content["notes"], content["described"], content["position"], states)

    def refuse_others(self, described: Mapping[str, Any]) -> None:
        """Raise TrainingError if the saved run has other settings."""
        before = self._described
        changed = [name for name in sorted(before.keys() | described.keys()) if before.get(name) != described.get(name)]
        if changed:
            shown = ", ".join(f"{name} was {before.get(name)!r}, is {described.get(name)!r}" for name in changed[:5])
            raise TrainingError(
                f"{self.path} is of a run with other settings ({shown}); use the same ones or another folder"
            )

    def take_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Position:
        """Load the saved weights and optimizer state, and return the saved position."""
        weights, moments = self._states
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return Position(**self._position)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Hyper-parameters of the training loop."""

    batch_tokens: int = 2000  # per process and step
    learning_rate: float = 5e-4
    warm_up_steps: int = 50
    least_rate: float = 0.05  # final learning rate, as a share of `learning_rate`
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0  # maximum norm of the gradients
    rank_from_step: int | None = 50  # first step that trains the rank head; None: never
    autocast: bool = True  # matrix products in bf16; weights, sums and optimizer state stay in fp32
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FitReport:
    """Report of one training step."""

    position: Position
    loss: float
    gradient_norm: float
    learning_rate: float
    fraction: float  # share of the run, 0 to 1, that was over at the start of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Point of the learning curve: one evaluation. Loss, gradient norm and learning rate are None before the first
    step."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    train_loss: float | None = None  # mean since the previous evaluation
    gradient_norm: float | None = None
    learning_rate: float | None = None
    skipped_steps: int = 0
    scores: HeldOutScores

    @staticmethod
    def of(reports: Sequence[FitReport], scores: HeldOutScores) -> "CurvePoint":
        """Build the point from the steps since the previous evaluation and the held-out scores."""
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
    """Learning curve of a run: its evaluations, also written to a file of JSON lines."""

    def __init__(self, folder: Path, *, up_to_step: int) -> None:
        """Read the curve of an interrupted run, without the points after `up_to_step`, whose steps run again; 0: start
        a new curve."""
        self._file = folder / CURVE_FILE
        self.points = [point for point in _read_points(self._file) if point.step <= up_to_step] if up_to_step else []
        self._file.write_text("".join(_point_line(point) for point in self.points))

    def add(self, point: CurvePoint) -> None:
        """Append an evaluation."""
        self.points.append(point)
        with self._file.open("a") as stream:
            stream.write(_point_line(point))


def _point_line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"


def _read_points(file: Path) -> list[CurvePoint]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [TypeAdapter(CurvePoint).validate_json(line) for line in lines if line.endswith("}")]


Objective = Callable[[Batch, torch.Generator], StepScores]
"""Computes losses and counts of a batch; the generator draws its random numbers."""


def make_optimizer(model: nn.Module, settings: FitSettings) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters, without weight decay, because they start as copies of the
    target's."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=settings.learning_rate, betas=settings.betas, weight_decay=0.0)


def clipped_gradients(loss: Tensor, trained: Sequence[nn.Parameter], clip: float, ranks: Ranks | None = None) -> Tensor:
    """Backpropagate `loss`, average the gradients over processes, and clip their norm to `clip`. Returns the norm
    before clipping, which is not finite if a gradient is not. # loss and result: scalars"""
    loss.backward()
    if ranks is not None:
        with torch.no_grad():
            ranks.average([parameter.grad for parameter in trained if parameter.grad is not None])
    return nn.utils.clip_grad_norm_(trained, clip)


class FitLoop:
    """Training loop: trains the weights of a model on batches of examples, in one or several processes."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        settings: FitSettings,
        reach: int,
        ranks: Ranks,
        position: Position,
    ) -> None:
        self.position = position
        self._objective = objective
        self._optimizer = optimizer
        self._settings = settings
        self._reach = reach
        self._ranks = ranks
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._device = self._trained[0].device
        ranks.spread([parameter.detach() for parameter in model.parameters()])

    def run(self, examples: list[Example], length: Length) -> Iterator[FitReport]:
        """Train until the end of the run, and yield a report after each step. Raises TrainingError if gradients stay
        non-finite, or if there are fewer batches than processes."""
        began = time.perf_counter() - self.position.seconds
        while True:
            for batch in self._batches(self._epoch(examples)[self.position.place :]):
                seconds = self._ranks.first(time.perf_counter() - began)
                fraction = length.fraction(self.position.step, seconds)
                self.position = replace(self.position, seconds=seconds)
                if fraction >= 1.0:
                    return
                yield self._step(batch, fraction)
            self.position = replace(self.position, epoch=self.position.epoch + 1, place=0)

    def _batches(self, groups: Sequence[list[Example]]) -> Iterator[Batch]:
        """Yield the batches of groups, each of which is collated on a thread while the previous step runs."""
        with ThreadPoolExecutor(max_workers=1) as maker:
            coming: Future[Batch] | None = None
            for group in groups:
                ready, coming = coming, maker.submit(Batch.of, group, self._reach, self._device)
                if ready is not None:
                    yield ready.result()
            if coming is not None:
                yield coming.result()

    def _epoch(self, examples: list[Example]) -> list[list[Example]]:
        """Return this process's share of the epoch's batches, of which all processes have the same number."""
        order = torch.Generator().manual_seed(self._settings.seed + _EPOCHS_APART * (self.position.epoch + 1))
        groups = list(batches(examples, tokens=self._settings.batch_tokens, generator=order))
        even = len(groups) // self._ranks.size * self._ranks.size
        if not even:
            raise TrainingError(
                f"{len(groups)} batches for {self._ranks.size} processes: give more responses or a smaller batch"
            )
        return groups[:even][self._ranks.rank :: self._ranks.size]

    def _step(self, batch: Batch, fraction: float) -> FitReport:
        step, settings = self.position.step, self._settings
        number = step * self._ranks.size + self._ranks.rank
        drawn = torch.Generator(self._device).manual_seed(settings.seed + _STEPS_APART * (number + 1))
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=settings.autocast):
            scores = self._objective(batch, drawn)
        learns_ranks = settings.rank_from_step is not None and step >= settings.rank_from_step
        loss = scores.draft_loss + scores.rank_loss if learns_ranks else scores.draft_loss
        norm = clipped_gradients(loss, self._trained, settings.clip, self._ranks)
        factor = rate_factor(step, fraction, warm_up_steps=settings.warm_up_steps, least=settings.least_rate)
        rate = settings.learning_rate * factor
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        before = self.position
        in_a_row = 0 if is_finite else before.skipped_in_a_row + 1
        if in_a_row >= _MOST_SKIPPED:
            raise TrainingError(
                f"the gradients of {in_a_row} steps in a row were not finite: lower the learning rate, "
                f"which is {settings.learning_rate:g}, or look for broken features"
            )
        self.position = replace(
            before,
            step=step + 1,
            place=before.place + 1,
            tokens=before.tokens + batch.num_tokens * self._ranks.size,
            skipped=before.skipped + (not is_finite),
            skipped_in_a_row=in_a_row,
        )
        return FitReport(self.position, scores.draft_loss.item(), norm.item(), rate, fraction)


def bf16_is_faster(device: torch.device, clocked: Callable[[torch.dtype], float] | None = None) -> bool:
    """Return whether matrix products in bf16 are faster than in fp32.

    On a CPU this is measured, in some hundredths of a second: with matrix units bf16 is up to ten times as fast,
    without them half as fast, whatever instruction sets the CPU reports. `clocked`: measures a product in a dtype, in
    seconds.
    """
    if device.type != "cpu":
        return True
    clocked = clocked or _product_seconds
    trials = [(clocked(torch.bfloat16), clocked(torch.float32)) for _ in range(_PRODUCT_TRIALS)]
    return min(bf16 for bf16, _ in trials) < min(fp32 for _, fp32 in trials)


def _product_seconds(dtype: torch.dtype) -> float:
    x = torch.ones(_PRODUCT_ROWS, _PRODUCT_INPUTS, dtype=dtype)
    weight = torch.ones(_PRODUCT_OUTPUTS, _PRODUCT_INPUTS, dtype=dtype)
    began = time.perf_counter()
    torch.nn.functional.linear(x, weight)
    return time.perf_counter() - began
