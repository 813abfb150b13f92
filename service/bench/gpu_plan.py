"""How much `adaptree bench gpu` measures: in full on a GPU, or tiny on a CPU, to see that every part of it runs."""

from dataclasses import dataclass
from pathlib import Path

from drafters.specblock import checkpoint
from service.assembly import Assembly, assemble
from service.bench.lossless_report import built_in_prompts
from service.config import ServiceConfig
from service.errors import StartupError

_DRY: dict[str, object] = {"model": "tiny", "load_format": "dummy", "load_dtype": "float32", "threads": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of every measurement."""

    for_real: bool
    minutes: float
    large: tuple[str, ...]  # random weights
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    kernel_batches: tuple[int, ...]
    concurrencies: tuple[int, ...]
    repeats: int
    copied_bytes: int
    steps: int  # of an engine, to see what one takes
    answers: int
    answer_tokens: int
    exact_tokens: int
    training_requests: int
    updates: int  # to be made while they are served, again and again if need be
    patience_seconds: float


FULL = Plan(
    for_real=True,
    minutes=8,
    large=("llama-3.1-8b", "qwen3-8b"),
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts=(256, 2048),
    kernel_batches=(1, 8),
    concurrencies=(1, 4, 16, 32),
    repeats=20,
    copied_bytes=1 << 30,
    steps=64,
    answers=8,
    answer_tokens=128,
    exact_tokens=5_000,
    training_requests=64,
    updates=4,
    patience_seconds=40,
)
DRY = Plan(
    for_real=False,
    minutes=8,
    large=("tiny",),
    rows=(1, 16),
    contexts=(32,),
    kernel_batches=(2,),
    concurrencies=(2,),
    repeats=1,
    copied_bytes=1 << 20,
    steps=3,
    answers=1,
    answer_tokens=8,
    exact_tokens=60,
    training_requests=12,
    updates=1,
    patience_seconds=60,
)


def check_device(config: ServiceConfig, plan: Plan, cuda_devices: int) -> None:
    """Raise StartupError where the plan cannot be carried out."""
    if plan.for_real and (cuda_devices == 0 or config.device == "cpu"):
        raise StartupError("bench gpu measures a GPU, and there is none: add --dry-run to try every part on a CPU")


def large_assembly(config: ServiceConfig, plan: Plan, name: str) -> Assembly:
    """Random weights of that shape, with a random drafter of two blocks."""
    longest = max(plan.contexts) + 512
    sizes = {
        "max_model_len": longest,
        "max_sequences": 8 if plan.for_real else 2,
        "kv_cache_gib": 8 if plan.for_real else 0.1,
    }
    drafting = {"drafter": "specblock", "drafter_path": None, "draft_blocks": 2, "budget_policy": "fixed"}
    return assemble(_changed(config, plan, {"model": name, "load_format": "dummy", **sizes, **drafting}))


def small_assembly(config: ServiceConfig, plan: Plan, folder: Path) -> Assembly:
    """The configured model; of a rehearsal a tiny one, with a random drafter that is stored, so that it can learn."""
    if plan.for_real:  # room beside it for more engines than a server has
        return assemble(_changed(config, plan, {"kv_cache_gib": 8}))
    sizes = {"max_model_len": 512, "max_sequences": 2, "kv_cache_gib": 0.1, "max_budget": 8, "budget_policy": "fixed"}
    values = {**_DRY, **sizes, "drafter": "specblock"}
    first = assemble(_changed(config, plan, values))
    assert first.weights is not None, "a dummy has a drafter"
    identity = first.loaded.parts.identity
    checkpoint.save(folder, first.weights.model, target_identity=identity, facts={}, own_head=True)
    return assemble(_changed(config, plan, {**values, "drafter_path": folder}))


def small_prompts(assembly: Assembly, plan: Plan) -> list[list[int]]:
    """Built-in prompts that leave room for an answer."""
    most = assembly.limits.max_model_len - plan.answer_tokens - 1
    return [prompt[:most] for prompt in built_in_prompts(assembly.tokenizer)]


def _changed(config: ServiceConfig, plan: Plan, values: dict[str, object]) -> ServiceConfig:
    on_cpu = {} if plan.for_real else {**_DRY, "device": "cpu", "graphs": "on"}
    return ServiceConfig.model_validate({**config.model_dump(), **on_cpu, **values, "kv_cache_share": None})
