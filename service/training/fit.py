"""Stage 3: from features to a drafter's weights, with a curve of the held-out texts and a state to go on from."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from adaptation.trainer import bf16_is_faster
from drafters.specblock import checkpoint
from drafters.specblock.model import Embed, PrefixEntries, SpecBlock, SpecBlockConfig
from drafters.training.corpus import Corpus, Example, TrainingError, frequent_tokens, held_out
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
from drafters.training.parallel import Ranks, local_device
from drafters.training.scores import Examiner
from service.assembly import device_of
from service.config import ServiceConfig
from service.engine.target import decoder_layers
from service.engine.weights import LoadedModel
from service.errors import StartupError
from service.logging import Advance, bar, say
from service.training.features import Manifest, load_target, sha256_of
from service.training.report import Curve, CurvePoint, facts_of, summary, write_card

STATE_FILE = "fit.pt"
ABLATIONS = ("shift", "broadcast", "valid_prefix", "coupling", "rank")
"""Parts of the method that a run can leave out, to see what they are worth."""

_INITIAL_POSITIONS = 100_000
_HELD_OUT_SHARE = 0.02
_HELD_OUT_PROMPTS = 64


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
class _Start:
    """A drafter before its first step, or where a run stopped."""

    model: SpecBlock
    embed: Embed
    optimizer: torch.optim.Optimizer
    position: Position
    notes: Mapping[str, Any]


def fit(loaded: LoadedModel, plan: FitPlan, ranks: Ranks) -> None:
    """Train until the plan's end and write the drafter. Raises StartupError or TrainingError; `loaded` is unpacked."""
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
    if ranks.rank != 0:
        for _ in trainer.run(trained, plan.length):  # the first process watches
            pass
        return
    settings = plan.settings
    examiner = Examiner(
        start.model, start.embed, apart, batch_tokens=2 * settings.batch_tokens, autocast=settings.autocast
    )
    points = _Watched(trainer, start, plan, examiner).run(trained)
    facts = facts_of(
        manifest,
        trainer.position,
        points,
        training={**plan.describe(), **start.notes, "held_out_texts": len(apart), "training_texts": len(trained)},
        device=loaded.model.device,
        num_processes=ranks.size,
    )
    own_head = start.model.lm_head.weight.requires_grad
    checkpoint.save(plan.out, start.model, target_identity=loaded.parts.identity, facts=facts, own_head=own_head)
    write_card(plan.out, facts)


def fit_drafter(config: ServiceConfig, plan: FitPlan, ranks: Ranks) -> None:
    """Stage 3 as a command runs it."""
    device = local_device(device_of(config.device))
    plan = replace(plan, settings=replace(plan.settings, autocast=plan.settings.autocast and bf16_is_faster(device)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # packed bf16 layers could not be copied
    try:
        fit(_load_in_turn(config, dtype, device, ranks), plan, ranks)
    except TrainingError as error:
        raise StartupError(str(error)) from error
    if ranks.rank == 0:
        say(f"done; serve with it: adaptree serve --model {config.model} --drafter-path {plan.out}")


def _load_in_turn(config: ServiceConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> LoadedModel:
    """The first process may have to unpack the target's file before the others find it."""
    if ranks.rank == 0:
        loaded = load_target(config, dtype, device)
        ranks.wait()
        return loaded
    ranks.wait()
    return load_target(config, dtype, device)


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
