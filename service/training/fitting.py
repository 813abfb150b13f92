"""Stage 3: from features to a drafter's weights, with a curve of the held-out texts and a state to go on from."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import embedding

from drafters.specblock import checkpoint
from drafters.specblock.config import PrefixEntries, SpecBlockConfig
from drafters.specblock.model import Embed, SpecBlock
from drafters.training.corpus import Corpus, Example, frequent_tokens, held_out
from drafters.training.fit import (
    FitSettings,
    Length,
    Position,
    StepReport,
    Trainer,
    load_state,
    make_optimizer,
    save_state,
    vocabulary_of,
)
from drafters.training.initialise import TargetEnd, initialise
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.parallel import Ranks
from drafters.training.scores import Examiner, Scores
from service.engine.target import decoder_layers
from service.engine.weights import LoadedModel
from service.errors import StartupError
from service.logging import Advance, bar, say
from service.training.features import Manifest, sha256_of

CURVE_FILE = "curve.jsonl"
PICTURE_FILE = "curve.png"

STATE_FILE = "fit.pt"
ABLATIONS = ("shift", "broadcast", "valid_prefix", "coupling", "rank")
"""Parts of the method that a run can leave out, to see what they are worth."""

_INITIAL_POSITIONS = 100_000
_HELD_OUT_SHARE = 0.02
_HELD_OUT_PROMPTS = 64


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
        self.points = [point for point in _read_points(self._file) if point.step <= up_to_step] if up_to_step else []
        self._file.write_text("".join(_point_line(point) for point in self.points))

    def add(self, point: CurvePoint) -> None:
        self.points.append(point)
        with self._file.open("a") as stream:
            stream.write(_point_line(point))
        _draw(self.points, self._picture)


def _point_line(point: CurvePoint) -> str:
    return json.dumps(asdict(point)) + "\n"


def _read_points(file: Path) -> list[CurvePoint]:
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [CurvePoint(**{**line, "scores": _scores_of(line["scores"])}) for line in lines]


def _scores_of(values: dict[str, object]) -> Scores:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan:
    """What to train, on what, for how long."""

    features: Path
    out: Path
    length: Length
    settings: FitSettings = field(default_factory=FitSettings)
    draft_vocab_size: int = 8192
    num_layers: int = 2
    block_size: int = 4
    prefix_entries: PrefixEntries = "first"
    anchor_share: float = 0.125
    without: frozenset[str] = frozenset()  # of ABLATIONS
    max_length: int = 512
    evaluate_seconds: float = 300.0
    start_from: Path | None = None  # folder of a trained drafter; None: from the target's own end

    def __post_init__(self) -> None:
        unknown = sorted(self.without - set(ABLATIONS))
        if unknown:
            raise StartupError(f"--ablate {', '.join(unknown)}: choose among {', '.join(ABLATIONS)}")

    @property
    def fit_settings(self) -> FitSettings:
        return replace(self.settings, rank_from_step=None) if "rank" in self.without else self.settings

    @property
    def objective(self) -> ObjectiveSettings:
        return ObjectiveSettings(
            anchor_share=self.anchor_share,
            valid_prefix="valid_prefix" not in self.without,
            coupled="coupling" not in self.without,
        )

    def describe(self) -> dict[str, Any]:
        """Everything that shapes the weights but the length of the run, as plain values."""
        return {
            **asdict(self.fit_settings),
            "betas": list(self.settings.betas),
            "draft_vocab_size": self.draft_vocab_size,
            "num_layers": self.num_layers,
            "block_size": self.block_size,
            "prefix_entries": self.prefix_entries,
            "anchor_share": self.anchor_share,
            "without": sorted(self.without),
            "max_length": self.max_length,
            "start_from": None if self.start_from is None else sha256_of(self.start_from / checkpoint.WEIGHTS_FILE),
        }


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained drafter and what is to be said of its training."""

    model: SpecBlock
    identity: str
    own_head: bool
    position: Position
    points: tuple[CurvePoint, ...]
    notes: Mapping[str, Any]
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class _Start:
    """A drafter before its first step, or where a run stopped."""

    model: SpecBlock
    embed: Embed
    optimizer: torch.optim.Optimizer
    position: Position
    notes: Mapping[str, Any]


def fit(loaded: LoadedModel, plan: FitPlan, ranks: Ranks) -> Fitted:
    """Train until the plan's end. Raises StartupError or TrainingError; `loaded` has unpacked layers."""
    manifest = Manifest.read(plan.features)
    _refuse_other_target(manifest, loaded, plan.features)
    corpus = Corpus(manifest.shard_paths(plan.features), max_length=plan.max_length)
    trained, apart = held_out(corpus.examples, share=_HELD_OUT_SHARE, most=_HELD_OUT_PROMPTS)
    _refuse_too_few(trained, plan, ranks)
    _make_folder(plan.out)
    start = _begin(loaded, plan, manifest, trained)
    trainer = Trainer(
        start.model,
        Objective(start.model, start.embed, plan.objective),
        start.optimizer,
        settings=plan.fit_settings,
        reach=2 * plan.block_size,
        ranks=ranks,
        position=start.position,
    )
    if ranks.rank == 0:
        examiner = Examiner(
            start.model,
            start.embed,
            apart,
            batch_tokens=2 * plan.settings.batch_tokens,
            autocast=plan.settings.autocast,
        )
        points = _Watched(trainer, start, plan, examiner).run(trained)
    else:
        points = _followed(trainer, trained, plan.length)
    notes = {**start.notes, "held_out_texts": len(apart), "training_texts": len(trained)}
    own_head = start.model.lm_head.weight.requires_grad
    return Fitted(start.model, loaded.parts.identity, own_head, trainer.position, tuple(points), notes, manifest)


def _followed(trainer: Trainer, examples: list[Example], length: Length) -> list[CurvePoint]:
    """A run that the first process watches."""
    for _ in trainer.run(examples, length):
        pass
    return []


class _Watched:
    """A run with a bar, evaluations, a curve and a saved state."""

    def __init__(self, trainer: Trainer, start: _Start, plan: FitPlan, examiner: Examiner) -> None:
        self._trainer = trainer
        self._start = start
        self._plan = plan
        self._examiner = examiner
        self._curve = Curve(plan.out, up_to_step=start.position.step)
        self._reports: list[StepReport] = []
        self._tokens_before = start.position.tokens

    def run(self, examples: list[Example]) -> list[CurvePoint]:
        if not self._curve.points:
            self._note(CurvePoint.at_start(self._examiner()))
        began = evaluated = time.perf_counter()
        with bar("training", 1.0) as advance:
            for report in self._trainer.run(examples, self._plan.length):
                self._reports.append(report)
                self._show(advance, report, time.perf_counter() - began)
                if time.perf_counter() - evaluated > self._plan.evaluate_seconds:
                    self._evaluate()
                    evaluated = time.perf_counter()
        if self._reports:
            self._evaluate()
        return self._curve.points

    def _show(self, advance: Advance, report: StepReport, seconds: float) -> None:
        rate = (report.position.tokens - self._tokens_before) / seconds
        advance(report.fraction, f"step {report.position.step}, loss {report.loss:.2f}, {rate:.0f} tokens/s")

    def _evaluate(self) -> None:
        self._note(CurvePoint.of(self._reports, self._examiner()))
        self._reports = []
        save_state(
            self._plan.out / STATE_FILE,
            self._start.model,
            self._start.optimizer,
            self._trainer.position,
            described=self._plan.describe(),
            notes=self._start.notes,
        )

    def _note(self, point: CurvePoint) -> None:
        self._curve.add(point)
        say(summary(point))


def summary(point: CurvePoint) -> str:
    """One evaluation in one line."""
    scores = point.scores
    alphas = " ".join("-" if alpha is None else f"{alpha:.2f}" for alpha in scores.alpha[:4])
    covered = scores.covered[0]
    return (
        f"step {point.step}, {point.tokens / 1e6:.2f}M tokens, {point.seconds / 60:.1f} min: loss {scores.loss:.3f}, "
        f"alpha {alphas}, ranks 1-4 {0.0 if covered is None else covered:.2f}, "
        f"tau chain {scores.chain_tau:.2f} tree {scores.tree_tau:.2f}"
    )


def _begin(loaded: LoadedModel, plan: FitPlan, manifest: Manifest, examples: list[Example]) -> _Start:
    saved = plan.out / STATE_FILE
    text = loaded.model.config.get_text_config()
    begun = None if plan.start_from is None else _begun(plan.start_from, loaded)
    if saved.exists():
        d2t = vocabulary_of(saved)
    elif begun is not None:
        d2t = begun.d2t
    else:
        d2t = frequent_tokens(examples, vocab_size=text.vocab_size, size=plan.draft_vocab_size)
    described = {name: value for name, value in text.to_dict().items() if name != "_name_or_path"}  # somebody's folder
    model = _model(plan, described, manifest.tap_layers, d2t).to(loaded.model.device)
    model.lm_head.weight.requires_grad_(loaded.parts.head is None)
    optimizer = make_optimizer(model, plan.settings)
    embed = _embedding(loaded.parts.embedding)
    if saved.exists():
        position, notes = load_state(saved, model, optimizer, described=plan.describe())
        say(f"{saved}: going on from step {position.step}")
        return _Start(model, embed, optimizer, position, notes)
    if begun is not None:
        say(f"starting from the drafter in {plan.start_from}")
        _take_over(model, begun)
        return _Start(model, embed, optimizer, Position(), {"started_from": plan.describe()["start_from"]})
    say("copying the target's end and solving for its input")
    drawn = torch.Generator().manual_seed(plan.settings.seed)
    made = initialise(model, _end(loaded), examples, positions=_INITIAL_POSITIONS, generator=drawn)
    return _Start(model, embed, optimizer, Position(), {"initialisation": asdict(made)})


def _begun(folder: Path, loaded: LoadedModel) -> SpecBlock:
    try:
        return checkpoint.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    except checkpoint.DrafterError as error:
        raise StartupError(f"--start-from: {error}") from error


@torch.no_grad()
def _take_over(model: SpecBlock, begun: SpecBlock) -> None:
    """Go on from another drafter's weights; how they are used may differ, their shapes must not."""
    weights = dict(begun.named_parameters())
    names = {name: tuple(value.shape) for name, value in model.named_parameters()}
    if names != {name: tuple(value.shape) for name, value in weights.items()}:
        raise StartupError("--start-from: that drafter has other layers or sizes than the one to be trained")
    for name, value in model.named_parameters():
        value.copy_(weights[name])


def _model(plan: FitPlan, target: Mapping[str, Any], taps: tuple[int, ...], d2t: Tensor) -> SpecBlock:
    torch.manual_seed(plan.settings.seed)  # the rank head starts from random weights
    config = SpecBlockConfig(
        target=target,
        tap_layers=taps,
        draft_vocab_size=d2t.shape[0],
        num_layers=plan.num_layers,
        block_size=plan.block_size,
        prefix_entries=plan.prefix_entries,
        shift="shift" not in plan.without,
        broadcast="broadcast" not in plan.without,
        coupled="coupling" not in plan.without,
        trained_length=plan.max_length,
    )
    model = SpecBlock(config).float()  # a target held in bf16 would make its layers so
    model.set_vocabulary(d2t)
    return model


def _end(loaded: LoadedModel) -> TargetEnd:
    output = loaded.model.get_output_embeddings()
    assert isinstance(output, torch.nn.Module), "a causal language model has an output layer"
    return TargetEnd(
        layers=list(decoder_layers(loaded.model).children()),
        norm=loaded.model.get_decoder().get_submodule("norm"),
        head=output.get_parameter("weight"),
        embedding=loaded.parts.embedding,
    )


def _embedding(table: Tensor) -> Embed:
    def embed(tokens: Tensor) -> Tensor:
        return embedding(tokens, table)

    return embed


def _refuse_other_target(manifest: Manifest, loaded: LoadedModel, folder: Path) -> None:
    if manifest.target_identity != loaded.parts.identity:
        raise StartupError(
            f"{folder} holds features of target {manifest.target_identity} ({manifest.target}), but this one is "
            f"{loaded.parts.identity}: give --target {manifest.target}, or make features of this one"
        )


def _refuse_too_few(examples: list[Example], plan: FitPlan, ranks: Ranks) -> None:
    tokens, needed = sum(example.length for example in examples), plan.settings.batch_tokens * ranks.size
    if tokens < needed:
        raise StartupError(
            f"{plan.features} leaves {tokens} tokens to train on beside the held-out texts, fewer than one step's "
            f"{needed}: answer more prompts, or lower --batch-tokens"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--out {folder}: {error}") from error


def final_scores(fitted: Fitted) -> Scores:
    """Those of the last evaluation."""
    return fitted.points[-1].scores
