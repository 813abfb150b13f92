"""Stage 3 of training: trains a drafter on features, evaluates it on held-out texts, and saves it to be resumed."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters import folders as published
from drafters.network import checkpoint
from drafters.network.config import config_from
from drafters.network.model import Embed, SpecBlock
from drafters.trained_kinds import trained_kind
from drafters.training.corpus import Example, TrainingError, frequent_tokens, held_out, load_examples, rarest_token
from drafters.training.fit import (
    Curve,
    CurvePoint,
    FitLoop,
    FitReport,
    FitSettings,
    Length,
    Position,
    SavedRun,
    bf16_is_faster,
    make_optimizer,
    save_state,
)
from drafters.training.initialise import initialise
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.parallel import Ranks, local_device
from drafters.training.replay import HeldOutScores, examine
from kernels.layers import Embedding
from service.assembly import device_of, load_target
from service.config import ServiceConfig
from service.engine.initial_drafter import layers_for, target_end
from service.engine.weights import LoadedModel
from service.errors import StartupError
from service.learning.cards import facts_of, write_card
from service.learning.features import Manifest, make_folder, sha256_of
from service.learning.options import FitOptions
from service.logging import bar, say

STATE_FILE = "fit.pt"

_INITIAL_POSITIONS = 100_000
_HELD_OUT_PROMPTS = 64
_MAX_LENGTH = 512


@dataclass(frozen=True, slots=True)
class FitPlan:
    """Plan of a training run: inputs, output folder, length and options."""

    features: Path
    out: Path
    length: Length
    options: FitOptions
    autocast: bool
    adapts: Path | None = None  # folder of a drafter, in any format, to train further in its own shape
    held_out_share: float = 0.02  # share of the prompts whose texts are held out

    @property
    def settings(self) -> FitSettings:
        """Settings of the training loop. The rank head trains from the end of the warm-up on, or not at all if it is
        ablated."""
        options = self.options
        return FitSettings(
            learning_rate=options.learning_rate,
            batch_tokens=options.batch_tokens,
            warm_up_steps=options.warm_up,
            rank_from_step=None if "rank" in self.options.without else options.warm_up,
            autocast=self.autocast,
            seed=options.seed,
        )

    @property
    def shape(self) -> dict[str, Any]:
        """Shape of the drafter kind with the options applied, as fields of `config.json`."""
        given = {} if self.options.layers is None else {"num_layers": self.options.layers}
        left_out: dict[str, Any] = {name: False for name in ("shift", "broadcast") if name in self.options.without}
        return {**trained_kind(self.options.kind).shape, **given, **left_out}

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Load the texts to train on and the held-out ones. Raises StartupError."""
        paths = Manifest.read(self.features).shard_paths(self.features)
        return held_out(load_examples(paths, max_length=_MAX_LENGTH), share=self.held_out_share, most=_HELD_OUT_PROMPTS)

    def describe(self, manifest: Manifest) -> dict[str, Any]:
        """List all settings that the weights depend on, except texts and length of the run, as plain values. A run is
        resumed only with equal ones."""
        options, settings = self.options, self.settings
        start_from = options.start_from
        return {
            "target_identity": manifest.target_identity,
            "tap_layers": list(manifest.tap_layers),
            **asdict(settings),
            "betas": list(settings.betas),
            "draft_vocab_size": options.draft_vocab,
            "kind": options.kind,
            "loss": "cross_entropy",  # runs of release 0.3.0 may have another one, and are refused
            **self.shape,
            "prefix_entries": "first",
            "anchored_rows": ObjectiveSettings().anchored_rows,
            "without": sorted(self.options.without),
            "max_length": _MAX_LENGTH,
            "start_from": None if start_from is None else sha256_of(start_from / checkpoint.WEIGHTS_FILE),
            **({} if self.adapts is None else {"adapts": sha256(published.weights_bytes(self.adapts)).hexdigest()}),
        }


@dataclass(frozen=True, slots=True)
class _Start:
    """State of a run before its first step, new or resumed."""

    model: SpecBlock
    embed: Embed
    optimizer: torch.optim.Optimizer
    position: Position
    described: Mapping[str, Any]
    notes: Mapping[str, Any]


def kept_length(out: Path) -> Length | None:
    """Read the length of the run in a folder; None if there is no run. Raises StartupError."""
    kept = _kept_notes(out).get("length")
    return None if kept is None else Length(**kept)


def _kept_notes(out: Path) -> Mapping[str, Any]:
    """Read the notes in the state of the run in a folder; empty if there is no run. Raises StartupError."""
    try:
        return SavedRun.read(out / STATE_FILE).notes if (out / STATE_FILE).exists() else {}
    except TrainingError as error:
        raise StartupError(str(error)) from error


def autocasts(out: Path, device: torch.device) -> bool:
    """Whether matrix products run in bf16; a resumed run keeps its choice. Raises StartupError."""
    kept = _kept_notes(out).get("autocast")
    return bf16_is_faster(device) if kept is None else bool(kept)


def target_dtype(device: torch.device) -> torch.dtype:
    """Type of the target's weights in training; float32 on a CPU, where bf16 layers are packed and could not be
    copied."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fit_drafter(
    config: ServiceConfig, ranks: Ranks, features: Path, out: Path, length: Length, options: FitOptions
) -> None:
    """Run stage 3: train to the end and write the drafter. Raises StartupError."""
    device = local_device(device_of(config.device))
    plan = FitPlan(features, out, length, options, autocasts(out, device))
    loaded = load_target(config, device, target_dtype(device))
    try:
        fit(loaded, plan, ranks)
    except TrainingError as error:
        raise StartupError(str(error)) from error
    if ranks.rank == 0:
        say(f"done; serve with it: adaptree serve --model {config.model} --drafter-path {out}")


def fit(loaded: LoadedModel, plan: FitPlan, ranks: Ranks) -> None:
    """Train as planned and write the drafter. Raises StartupError and TrainingError."""
    manifest, settings = Manifest.read(plan.features), plan.settings
    _refuse_other_target(manifest, loaded, plan.features)
    trained, apart = plan.examples()
    _refuse_too_few(trained, plan, ranks)
    make_folder(plan.out)
    start = _begin(loaded, plan, manifest, trained)
    start = replace(start, notes={**start.notes, "length": asdict(plan.length), "autocast": plan.autocast})
    objective = ObjectiveSettings(
        valid_prefix="valid_prefix" not in plan.options.without,
        coupled="coupling" not in plan.options.without,
    )
    trainer = FitLoop(
        start.model,
        Objective(start.model, start.embed, objective),
        start.optimizer,
        settings=settings,
        reach=start.model.config.reach,
        ranks=ranks,
        position=start.position,
    )
    if ranks.rank != 0:
        for _ in trainer.run(trained, plan.length):  # the first process evaluates
            pass
        return
    tokens, autocast = 2 * settings.batch_tokens, settings.autocast
    score = partial(examine, start.model, start.embed, apart, batch_tokens=tokens, autocast=autocast)
    points = _watched(trainer, trained, start, plan, score)
    facts = facts_of(
        asdict(manifest),
        trainer.position,
        points,
        training={**start.described, **start.notes, "held_out_texts": len(apart), "training_texts": len(trained)},
        device=loaded.model.device,
        num_processes=ranks.size,
    )
    # Other engines read the head of a kind in its published shape from its file.
    own_head = start.model.lm_head.weight.requires_grad or start.model.config.family is not None
    checkpoint.save(plan.out, start.model, target_identity=loaded.parts.identity, facts=facts, own_head=own_head)
    write_card(plan.out, facts)


def _watched(
    trainer: FitLoop, examples: list[Example], start: _Start, plan: FitPlan, score: Callable[[], HeldOutScores]
) -> list[CurvePoint]:
    """Run the training loop with a progress bar, evaluating and saving regularly; returns the curve's points."""
    curve = Curve(plan.out, up_to_step=start.position.step)
    reports: list[FitReport] = []

    def save() -> None:
        state, described = plan.out / STATE_FILE, start.described
        save_state(state, start.model, start.optimizer, trainer.position, described=described, notes=start.notes)

    def add(point: CurvePoint) -> None:
        curve.add(point)
        say(str(point))

    def evaluate() -> None:
        add(CurvePoint.of(reports, score()))
        reports.clear()
        save()

    if not curve.points:
        add(CurvePoint(scores=score()))
    began = evaluated = time.perf_counter()
    with bar("training", 1.0) as advance:
        for report in trainer.run(examples, plan.length):
            reports.append(report)
            rate = (report.position.tokens - start.position.tokens) / (time.perf_counter() - began)
            advance(report.fraction, f"step {report.position.step}, loss {report.loss:.2f}, {rate:.0f} tokens/s")
            if time.perf_counter() - evaluated > plan.options.evaluate_minutes * 60:
                evaluate()
                evaluated = time.perf_counter()
    if reports:
        evaluate()
    elif trainer.position.step:
        save()  # records that the run has ended
    return curve.points


def _begin(loaded: LoadedModel, plan: FitPlan, manifest: Manifest, examples: list[Example]) -> _Start:
    start_from = plan.options.start_from
    adapted = None if plan.adapts is None else _adapted(plan.adapts, loaded)
    begun = adapted if start_from is None else _begun(start_from, loaded)
    text = loaded.model.config.get_text_config()
    mask = {}
    if plan.shape.get("silent_first"):
        known = None if begun is None else begun.config.described.get("mask_token")
        mask = {"mask_token": rarest_token(examples, vocab_size=text.vocab_size) if known is None else known}
    described = {**plan.describe(manifest), **mask}
    if adapted is not None:
        shape = adapted.config.described
        described |= {name: shape[name] for name in described.keys() & shape.keys() - {"tap_layers"}}
    saved = SavedRun.read(plan.out / STATE_FILE) if (plan.out / STATE_FILE).exists() else None
    if saved is not None:
        saved.refuse_others(described)
        d2t = saved.d2t
    elif begun is not None:
        d2t = begun.d2t
    else:
        d2t = frequent_tokens(examples, vocab_size=text.vocab_size, size=plan.options.draft_vocab)
    if adapted is not None:
        model = adapted
    else:
        shape = {"target": layers_for(text, plan.options.kind), **plan.shape, **mask}
        model = _model(plan, shape, manifest.tap_layers, d2t).to(loaded.model.device)
        model.lm_head.weight.requires_grad_(loaded.parts.head is None)
    optimizer = make_optimizer(model, plan.settings)
    embed = Embedding(loaded.parts.embedding)
    if saved is not None:
        position = saved.take_up(model, optimizer)
        say(f"{saved.path}: resuming at step {position.step}")
        return _Start(model, embed, optimizer, position, described, saved.notes)
    if adapted is not None:
        return _Start(model, embed, optimizer, Position(), described, {})
    if begun is not None:
        say(f"starting from the drafter in {start_from}")
        _take_over(model, begun)
        return _Start(model, embed, optimizer, Position(), described, {"started_from": described["start_from"]})
    say("copying the target's end and solving for its input")
    drawn = torch.Generator().manual_seed(plan.settings.seed)
    made = initialise(model, target_end(loaded.model), embed, examples, positions=_INITIAL_POSITIONS, generator=drawn)
    return _Start(model, embed, optimizer, Position(), described, {"initialisation": made})


def _adapted(folder: Path, loaded: LoadedModel) -> SpecBlock:
    """Load a drafter for further training; its head is trained unless it is the target's."""
    model = published.load(folder, loaded.parts, dtype=torch.float32, device=loaded.model.device).requires_grad_(True)
    model.lm_head.requires_grad_(checkpoint.HEAD in published.names_in_file(folder, loaded.parts))
    return model


def _begun(folder: Path, loaded: LoadedModel) -> SpecBlock:
    try:
        return checkpoint.load(folder, loaded.parts, dtype=torch.float32, device="cpu")
    except checkpoint.DrafterError as error:
        raise StartupError(f"--start-from: {error}") from error


def _take_over(model: SpecBlock, begun: SpecBlock) -> None:
    """Copy another drafter's weights, which may be of another kind: only tensors that the new drafter has, and only the
    first positions if the other drafter's blocks are longer. Raises StartupError if they do not fit."""
    own, others = checkpoint.weights_of(model), checkpoint.weights_of(begun)
    known = {name: others[name][: len(value)] for name, value in own.items() if name in others}
    fits = {name: value.shape for name, value in known.items()} == {name: value.shape for name, value in own.items()}
    if not fits or model.config.num_layers != begun.config.num_layers:
        raise StartupError("--start-from: layers or sizes of that drafter differ from those of the one to be trained")
    checkpoint.write_weights(model, known)


def _model(plan: FitPlan, shape: Mapping[str, Any], taps: tuple[int, ...], d2t: Tensor) -> SpecBlock:
    torch.manual_seed(plan.settings.seed)  # the rank head starts from random weights
    try:
        config = config_from(
            {
                "tap_layers": taps,
                "draft_vocab_size": d2t.shape[0],
                "coupled": "coupling" not in plan.options.without,
                "trained_length": _MAX_LENGTH,
                "kind": plan.options.kind,
                **shape,
            }
        )
    except ValueError as error:
        raise StartupError(str(error)) from error
    model = SpecBlock(config)
    model.set_vocabulary(d2t)
    return model


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
            f"{plan.features} leaves {tokens} tokens to train on besides the held-out texts, fewer than one step's "
            f"{needed}: answer more prompts, or lower --batch-tokens"
        )
