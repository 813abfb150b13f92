"""Builds an engine from the settings; no other module unpacks the configuration. The server, the benchmarks and the
checks all use it, so that they measure the engine that serves."""

import hashlib
import importlib.util
import logging
import platform
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from adaptation.config import Tuning, free_memory
from drafters.decision import RegretLedger
from drafters.language_model.drafter import scratch_places
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.protocol import MIN_SURVIVAL, Drafter, MemorySizes, Observer
from drafters.registry import NoDrafter, TrainedWeights, taps_of
from kernels import ops
from kernels.cpu import library
from kernels.cpu.library import return_large_buffers, use_threads
from kernels.graph_runner import capture_for
from kernels.pieces import NUM_PIECES
from service import __version__
from service.config import ServiceConfig, check_writable
from service.drafter import (
    DraftModel,
    begin_drafter,
    choose_drafter,
    draft_model_of,
    drafter_needs,
    load_drafter,
    make_drafter,
)
from service.engine import memory_planner
from service.engine.accounting import LearningHooks
from service.engine.budget import Budget, CostBudget, FixedBudget
from service.engine.captured import capture_forwards
from service.engine.checks import VERIFIED, longrope_factors
from service.engine.costs import Costs, write_whole
from service.engine.ends import names_of_ends
from service.engine.engine import Engine, EngineLimits, Vocabulary
from service.engine.measuring import Numerics, check, costs_at_start
from service.engine.memory_planner import KVRoom, MemoryPlan, memory_for, room_for
from service.engine.target import Target
from service.engine.weights import BeginDrafter, LoadedModel, describe, load_model
from service.errors import StartupError
from service.follow import SharedModel, load_shared, refuse_sharing
from service.learning.auto import Facts, decide, facts_file
from service.logging import bar
from service.text.grammars import GrammarCompiler
from service.text.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

NO_KERNELS = "none compiled for this processor: install the wheel, or g++ and run `make install`"


@dataclass(frozen=True, slots=True)
class Assembly:
    """Loaded target with its tokenizer and limits, from which engines are made."""

    config: ServiceConfig
    loaded: LoadedModel
    target: Target
    numerics: Numerics
    tokenizer: ChatTokenizer
    limits: EngineLimits
    costs: Costs | None  # None with a fixed budget
    drafter_name: str
    drafter_folder: Path | None  # folder with the drafter's weights; None: it has none
    weights: TrainedWeights | None  # None: the drafter is not a trained one
    draft_model: DraftModel | None = None  # a language model that drafts
    has_room: bool = True  # whether learning takes a small part of the free memory

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the text depends on: weights, dtype, numerics, kernels, threads, but not the
        drafter."""
        kernels = ops.kernel_set(self.target.device)
        same_bits = self.loaded.is_quantised and not self.loaded.has_experts and self.target.runs_by_ops
        if same_bits and kernels != "torch":
            kernels = platform.machine()  # torch's results depend on the width of its vectors
        pieces = 1 if self.target.device.type == "cuda" and self.config.tensor_parallel == 1 else NUM_PIECES
        layout = f"{torch.get_num_threads()} {kernels} {pieces}"
        parts = f"{self.loaded.fingerprint} {self.loaded.dtype_name} {self.numerics} {layout}"
        return "fp_" + hashlib.sha256(parts.encode()).hexdigest()[:12]

    @property
    def facts(self) -> Facts:
        """What decides whether it learns."""
        costs, weights = self.costs, self.weights
        share = None if costs is None or weights is None else costs.draft_share / weights.blocks
        return Facts(weights is not None, self.has_room, self.loaded.initial_drafter is None, share)

    @property
    def learns(self) -> tuple[bool, str]:
        """Whether it learns while it serves, and the reason."""
        return decide(self.config, self.facts)

    @property
    def grammars(self) -> GrammarCompiler:
        """Grammar compiler for the target's tokens."""
        return GrammarCompiler(self.tokenizer, self.target.vocab_size, self.loaded.eos_token_ids)

    def drafter(
        self,
        name: str | None = None,
        limits: EngineLimits | None = None,
        weights: TrainedWeights | None = None,
        ledger: RegretLedger | None = None,
        observer: Observer | None = None,
    ) -> Drafter:
        """Build the configured drafter, or another one by name or with other weights. `ledger`: the engine's;
        `observer` receives the forwards of its network. Raises StartupError."""
        name, limits = name or self.drafter_name, limits or self.limits
        weights = weights or self.weights
        return make_drafter(name, self.target, limits, weights, ledger, self.draft_model, observer)

    def engine(
        self,
        drafter: Drafter | None = None,
        policy: Budget | None = None,
        limits: EngineLimits | None = None,
        learning: LearningHooks | None = None,
        ledger: RegretLedger | None = None,
    ) -> Engine:
        """Build an idle engine as configured; arguments replace its drafter, budget policy, limits or ledger.
        `learning`: receives finished queries."""
        ledger = ledger or RegretLedger()
        with memory_for("captured steps", "lower kv_cache"):
            return Engine(
                self.target,
                limits or self.limits,
                Vocabulary(self.tokenizer, self.loaded.eos_token_ids),
                drafter or self.drafter(limits=limits, ledger=ledger),
                policy or self._policy(ledger),
                ledger=ledger,
                learning=learning,
            )

    def _policy(self, ledger: RegretLedger) -> Budget:
        """Build a budget policy by measured costs, or a fixed one if nothing was measured or nothing is drafted."""
        costs, most = self.costs, 0 if self.drafter_name == NoDrafter.name else self.limits.max_budget
        priced = None if costs is None or not most else (costs.verify, costs.drafts, ledger)
        return FixedBudget(most) if priced is None else CostBudget(*priced, head_share=self.loaded.head_share)


def assemble(config: ServiceConfig, *, graphs: bool | None = None) -> Assembly:
    """Load the model, check its numerics and measure its costs. `graphs`: whether decoding is captured in CUDA graphs,
    which changes no text; by default on a GPU. Raises StartupError naming the setting to change."""
    return_large_buffers()
    use_threads(config.num_threads)
    check_writable(config.state_dir)
    device = device_of(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the thread's device, wherever the tensors are
    captures = device.type == "cuda" if graphs is None else graphs
    choose_drafter(config, starts=True)  # refuse an impossible one before loading anything
    loaded = load_target(config, device, begin=begin_drafter(config), shares=True)
    tokenizer = ChatTokenizer(loaded.tokenizer)
    tokenizer.refuse_narrow_vocabulary(loaded.model.config.get_text_config().vocab_size)
    captures = captures and not loaded.kv_shape.bytes_per_state and config.tensor_parallel == 1
    limits = limits_of(config, loaded.max_positions)
    if not (has_room := _has_room(config, loaded, limits, loaded.initial_drafter)):
        loaded = replace(loaded, initial_drafter=None)
    drafter_name, folder = choose_drafter(config, starts=loaded.initial_drafter is not None)
    trained = load_drafter(folder, loaded, blocks=config.draft_blocks)
    weights = None if trained is None else trained.serving
    has_room = has_room and _has_room(config, loaded, limits, weights.network if weights else None)
    drafting = _draft_model(config, drafter_name, loaded, limits)
    target = _target(config, loaded, limits, drafter_name, weights, drafting, captures=captures)
    target.never_choose(tokenizer.unknown_ids(target.vocab_size))
    numerics = _numerics(target, limits, captures=captures)
    assembly = Assembly(
        config, loaded, target, numerics, tokenizer, limits, None, drafter_name, folder, weights, drafting, has_room
    )
    if config.budget_policy == "cost":
        costs = _costs(assembly)
        least = max(MIN_SURVIVAL, costs.least_that_pays)
        assembly = replace(assembly, costs=costs, limits=replace(limits, least_survival=least))
        write_whole(facts_file(config), assembly.facts)
    logger.info("%s", start_up_line(assembly))
    return assembly


def load_target(
    config: ServiceConfig,
    device: torch.device,
    dtype: torch.dtype | None = None,
    begin: BeginDrafter | None = None,
    *,
    shares: bool = False,
) -> LoadedModel:
    """Load the model in the configured type or in `dtype`; `begin` makes its initial drafter. `shares`: with as many
    processes as configured. Raises StartupError."""
    if (config.load_dtype, device.type) in (("int8", "cuda"), ("float16", "cpu")):
        raise StartupError(
            f"load_dtype {config.load_dtype}: there are no kernels for it on a {device.type}; use bfloat16"
        )
    in_8_bits = dtype is None and config.load_dtype == "int8"
    in_blocks = dtype is None and config.load_dtype == "auto" and device.type == "cpu" and library.variant() is not None
    dtype = dtype_of(config, device) if dtype is None else dtype
    with memory_for("the weights", "choose a smaller model, or load_dtype bfloat16"):
        options = {**config.model_dump(include={"unverified", "max_model_len"}), "revision": config.revision}
        described = describe(config.model_source, **options)
        load = partial(load_model, described, dtype=dtype, device=device, in_blocks=in_blocks)
        if config.tensor_parallel == 1 or not shares:
            loaded = load(begin_drafter=begin)
        else:
            refuse_sharing(device)
            how = str(device), str(dtype).removeprefix("torch."), in_blocks, in_8_bits, config.num_threads
            what = SharedModel(config.model_source, options, *how)
            loaded = load_shared(described, config.tensor_parallel, what, load)
    return replace(loaded, in_8_bits=in_8_bits)


def dtype_of(config: ServiceConfig, device: torch.device) -> torch.dtype:
    """Return the type of weights, keys and values as configured."""
    named = config.load_dtype not in ("auto", "int8")
    dtype: torch.dtype = getattr(torch, config.load_dtype) if named else default_dtype(device)
    return dtype


def default_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 if the device has kernels for it, which halves the bytes that every step reads; otherwise fp32."""
    return torch.bfloat16 if device.type == "cuda" or library.variant() else torch.float32


def _draft_model(
    config: ServiceConfig, drafter_name: str, loaded: LoadedModel, limits: EngineLimits
) -> DraftModel | None:
    """Load the language model that drafts. Returns None if the drafter has none."""
    if "model" not in drafter_needs(drafter_name):
        return None
    name, length = str(config.drafter_path), limits.max_model_len
    other = {"model": name, "drafter": "none", "drafter_path": None, "max_model_len": length}
    found = load_target(config.model_copy(update=other), loaded.model.device)
    return draft_model_of(found, loaded, name=name, max_model_len=limits.max_model_len)


def _target(
    config: ServiceConfig,
    loaded: LoadedModel,
    limits: EngineLimits,
    drafter_name: str,
    weights: TrainedWeights | None,
    drafting: DraftModel | None,
    *,
    captures: bool,
) -> Target:
    """Build the target with its KV cache; on a GPU, the memory of all other parts is reserved first."""
    beside, size = 0 if drafting is None else drafting.model.pool.shape.bytes_per_slot, config.tensor_parallel
    network, device = weights.network if weights else None, loaded.model.device
    taps = taps_of(drafter_name, len(loaded.kv_shape.layers), network.config.tap_layers if network else ())
    target = memory_planner.target_without_room(loaded, limits, taps)
    states = loaded.kv_shape.state_bytes(memory_planner.running_states(loaded.kv_shape, limits))
    pool_bytes = config.kv_cache_bytes(device.type, 0, states_bytes=states) // size
    if device.type == "cuda":
        learning = _learning(config, loaded) if _has_room(config, loaded, limits, network) else None
        needs = memory_planner.needs_of(target, limits, network, learning, captures=captures)
        trees = scratch_places(limits.max_sequences) * beside
        needs = (*needs, memory_planner.Need("trees of the drafting model", trees, "lower max_sequences"))
        plan = MemoryPlan(torch.cuda.mem_get_info(device)[0], needs)
        pool_bytes = config.kv_cache_bytes(device.type, plan.left_bytes * size) // size
        plan.check(pool_bytes)
        logger.info("device memory reserved in addition to the KV cache: %s", plan.described())
    else:
        memory_planner.check_free_memory(0, pool_bytes)  # of this process
    if device.type == "cuda" or loaded.kv_shape.window is not None:  # windows leave room for many more slots
        beside += memory_planner.entry_bytes(network)
    memory_planner.give_room(target, loaded, room_for(loaded.kv_shape, pool_bytes, limits, bytes_beside=beside))
    return target


def _learning(config: ServiceConfig, loaded: LoadedModel) -> memory_planner.LearningSizes | None:
    learning = config.adaptation
    if not decide(config)[0]:
        return None
    trains_here = learning.train_device == "same" or torch.device(learning.train_device) == loaded.model.device
    tuning = Tuning()
    kept_texts = tuning.validation_texts + tuning.unscored_texts + tuning.queued_queries  # no replay buffer
    makes = loaded.initial_drafter is not None
    return memory_planner.LearningSizes(trains_here, tuning.window_tokens, tuning.target_top, kept_texts, makes)


def _has_room(
    config: ServiceConfig, loaded: LoadedModel, limits: EngineLimits, network: SpecBlock | ServingNetwork | None
) -> bool:
    """Whether learning takes a small part of the free memory, where that decides whether it is on."""
    sizes = _learning(config, loaded) if config.adaptation.enabled == "auto" else None
    device = loaded.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    return memory_planner.learning_fits(limits, network, sizes, free)


def _numerics(target: Target, limits: EngineLimits, *, captures: bool) -> Numerics:
    """Check whether rows of a forward depend on its other rows, with the forwards that will serve."""
    logger.info("checking that requests that run together do not change each other's answers")
    if captures:
        with memory_for("captured forwards", "lower kv_cache"):
            capture_forwards(
                target,
                capture_for(target.device),
                max_sequences=limits.max_sequences,
                max_nodes=limits.max_budget,
                max_length=limits.max_model_len,
            )
    return check(target)


def _costs(assembly: Assembly) -> Costs:
    loaded, weights, drafting = assembly.loaded, assembly.weights, assembly.draft_model
    if weights is not None:
        weights = replace(weights, ready=lambda: True)  # its cost does not depend on its weights
    drafter = f"{assembly.drafter_name} {weights.blocks if weights else 1}"
    if drafting is not None:
        drafter += f" {drafting.fingerprint}"

    with bar("measuring how long steps take (first start only)", 1.0) as advance:
        return costs_at_start(
            assembly.target,
            lambda: assembly.drafter(weights=weights),
            assembly.limits,
            {"model": f"{loaded.fingerprint} {loaded.dtype_name}", "drafter": drafter, "version": __version__},
            folder=assembly.config.state_dir / "costs",
            progress=lambda done, total: advance(done / total, f"{done} of {total}"),
        )


def start_up_line(assembly: Assembly) -> str:
    """Describe model, device, dtype, slots, numerics, kernels, drafter and end tokens in one line."""
    target, loaded = assembly.target, assembly.loaded
    kernels = ops.kernel_set(target.device)
    if kernels == "torch":
        kernels += f" ({NO_KERNELS})"
    family = loaded.model.config.get_text_config().model_type
    unverified = "" if family in VERIFIED else f" (family {family}: unverified)"
    length, pool = assembly.limits.max_model_len, target.pool
    room = KVRoom(pool.num_slots, pool.num_places, pool.states)
    factors = longrope_factors(loaded.model.config, length)
    rope = "" if factors is None else f" ({factors} factors of longrope)"
    count = assembly.config.tensor_parallel
    device = f"{target.device}{'' if count == 1 else f' in {count} processes'}"
    steps = "in CUDA graphs" if target.capture is not None else "not in CUDA graphs"
    return (
        f"adaptree {__version__}: model {assembly.config.public_model_name}{unverified}, device {device}, "
        f"dtype {loaded.dtype_name}, KV cache {room.described}, "
        f"context {length}{rope}, steps {steps}, numerics: {assembly.numerics}, kernels: {kernels}, "
        f"drafter {assembly.drafter_name}, ends {names_of_ends(loaded.eos_token_ids, loaded.tokenizer)}"
    )


def device_of(name: str) -> torch.device:
    """Return the device with this name, or for `auto` the best one. Raises StartupError if it or its kernels are
    missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        try:
            ops.kernel_set(device)
        except ImportError as error:
            raise StartupError(str(error)) from error
        return device
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise StartupError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices; set device to cpu"
        )
    if importlib.util.find_spec("triton") is None:
        raise StartupError(f"device {name!r}: its kernels need the package triton: pip install 'adaptree[gpu]'")
    return torch.device("cuda", index)


def limits_of(config: ServiceConfig, model_positions: int) -> EngineLimits:
    """Sizes of the engine as configured. Raises StartupError if the model has fewer positions."""
    length = config.max_model_len or model_positions
    if length > model_positions:
        raise StartupError(
            f"max_model_len is {length}, but the model supports {model_positions} tokens: lower max_model_len"
        )
    return EngineLimits(
        max_model_len=length,
        max_sequences=config.max_sequences,
        prefill_chunk=config.prefill_chunk,
        max_budget=config.max_budget,
        prefix_cache=config.prefix_cache != "off",
        # A share per API key, and if the users of a key are separated, one per concurrent user.
        memory=MemorySizes(
            num_bytes=config.memory_bytes,
            owners=max(1, len(config.api_keys)),
            scopes=config.max_sequences if config.prefix_cache == "per_client" else 1,
            has_keys=bool(config.api_keys),
        ),
        pace_seconds=config.pace_seconds,
        steps_ahead={"on": 1, "off": 0}.get(config.async_scheduling, int(device_of(config.device).type == "cuda")),
    )
