"""The stages as commands run them, one by one or all in a given time: load what a stage needs, run it, let it go.

The one place where settings are unpacked for training.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from adaptation.trainer import bf16_is_faster
from drafters.training.corpus import TrainingError
from drafters.training.fit import Length
from drafters.training.parallel import Ranks, join, local_device
from service.assembly import assemble, device_of
from service.config import ServiceConfig
from service.engine import build
from service.engine.target import decoder_layers, default_tap_layers
from service.engine.weights import LoadedModel, load_model
from service.errors import StartupError
from service.logging import bar, say
from service.prompts import read_prompts
from service.training.features import FeatureReader, describe, write_shards
from service.training.fit import STATE_FILE, FitPlan, fit
from service.training.regenerate import Answered, Answering, read_responses, regenerate

_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 16384
_ANSWER_SHARE = 0.4
_FEATURE_SHARE = 0.3
"""Most of the time these stages may take in a run of all stages; what they leave goes to training."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """One run of all stages."""

    prompts: tuple[Path, ...]
    responses: tuple[Path, ...]  # existing ones are taken as they are; with none, the prompts are answered
    minutes: float
    answering: Answering
    plan: FitPlan  # its length is replaced by what the other stages leave

    @property
    def work(self) -> Path:
        """What the stages hand to each other."""
        return self.plan.out / "work"


def answer_prompts(config: ServiceConfig, prompts: Sequence[Path], out: Path, how: Answering) -> int:
    """Stage 1; returns how many responses there are."""
    wanted = read_prompts(prompts)
    assembly = assemble(config)
    return regenerate(
        assembly.engine(), assembly.tokenizer, wanted, out, how, max_model_len=assembly.limits.max_model_len
    )


def make_features(config: ServiceConfig, responses: Sequence[Path], out: Path, *, deadline: float | None = None) -> int:
    """Stage 2; returns the number of shards. After the deadline (time.monotonic()) no further shard is begun."""
    answered = read_responses(responses)
    if answered.too_short:
        say(f"left out {answered.too_short} responses that are too short to teach")
    device = device_of(config.device)
    loaded = _load(config, _DTYPES.get(config.load_dtype) or build.default_dtype(device), device)
    taps = default_tap_layers(len(decoder_layers(loaded.model)))
    most = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
    reader = FeatureReader(loaded.model, taps, batch_tokens=most)
    began = time.monotonic()
    shards, kept = 0, Answered([], answered.too_short)
    with bar("reading features", answered.num_tokens) as advance:
        for chunk in write_shards(reader, answered.responses, out):
            shards, kept = shards + 1, Answered([*kept.responses, *chunk], kept.too_short)
            rate = kept.num_tokens / (time.monotonic() - began)
            advance(kept.num_tokens, f"shard {shards}, {rate:.0f} tokens/s")
            if deadline is not None and time.monotonic() > deadline:
                break
    name, identity = config.public_model_name, loaded.parts.identity
    describe(kept, responses, target=name, target_identity=identity, tap_layers=taps, shards=shards).write(out)
    return shards


def fit_drafter(config: ServiceConfig, plan: FitPlan, ranks: Ranks) -> None:
    """Stage 3, and the files of the drafter."""
    device = local_device(device_of(config.device))
    plan = replace(plan, settings=replace(plan.settings, autocast=plan.settings.autocast and bf16_is_faster(device)))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # packed bf16 layers could not be copied
    try:
        fit(_load_in_turn(config, dtype, device, ranks), plan, ranks)
    except TrainingError as error:
        raise StartupError(str(error)) from error
    if ranks.rank == 0:
        say(f"done; serve with it: adaptree serve --model {config.model} --drafter-path {plan.out}")


def train_drafter(config: ServiceConfig, wanted: Everything, ranks: Ranks) -> None:
    """All stages within the time; the first process prepares the data of all."""
    began = time.monotonic()
    features = wanted.work / "features"
    # A run that is taken up again goes on with the texts it began with.
    if ranks.rank == 0 and not (wanted.plan.out / STATE_FILE).exists():
        deadline = began + _ANSWER_SHARE * wanted.minutes * 60
        responses = wanted.responses or (_answered(config, wanted, deadline),)
        make_features(config, responses, features, deadline=time.monotonic() + _FEATURE_SHARE * wanted.minutes * 60)
    ranks.wait()
    left = wanted.minutes * 60 - (time.monotonic() - began)
    say(f"{max(left, 0.0) / 60:.1f} minutes are left for training")
    if left <= 0:
        raise StartupError("answers and features took all the time: run again, they are kept, or give more --minutes")
    fit_drafter(config, replace(wanted.plan, features=features, length=Length(seconds=left)), ranks)


def _answered(config: ServiceConfig, wanted: Everything, deadline: float) -> Path:
    file = wanted.work / "responses.jsonl"
    answer_prompts(config, wanted.prompts, file, replace(wanted.answering, deadline=deadline))
    return file


def length_of(minutes: float | None, steps: int | None) -> Length:
    """Raises StartupError when neither is given."""
    try:
        return Length(steps, None if minutes is None else minutes * 60)
    except TrainingError as error:
        raise StartupError(f"{error}: give --minutes or --steps") from error


def processes(config: ServiceConfig) -> Ranks:
    """Those of this run, on the device each has."""
    torch.set_num_threads(config.num_threads)
    device = local_device(device_of(config.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return join(device)


def _load_in_turn(config: ServiceConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> LoadedModel:
    """The first process may have to unpack the target's file before the others find it."""
    if ranks.rank == 0:
        loaded = _load(config, dtype, device)
        ranks.wait()
        return loaded
    ranks.wait()
    return _load(config, dtype, device)


def _load(config: ServiceConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    cache = config.state_dir / "cache"
    return load_model(config.model_source, revision=config.revision, dtype=dtype, device=device, cache_dir=cache)
