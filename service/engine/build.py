"""Building the engine's parts and measuring what they cost on this machine. Takes plain values, no configuration."""

from dataclasses import dataclass

import torch

from drafters.protocol import Drafter, DraftingSizes
from drafters.registry import TrainedWeights, build_drafter
from kernels.graph_runner import Capture
from kernels.tree_attention import NULL_SLOT
from service.engine.accounting import Learning
from service.engine.budget import BudgetPolicy, CostBudget, FixedBudget
from service.engine.costs.model import Costs, CostTable
from service.engine.drafting import DraftStage
from service.engine.engine import Engine, Vocabulary
from service.engine.kv_pool import SlotPool, SlotTable
from service.engine.linear import can_pack
from service.engine.prefix_cache import PrefixCache
from service.engine.scheduler import Scheduler
from service.engine.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of an engine's tables."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    max_budget: int
    prefix_cache: bool = False
    isolate_clients: bool = False  # nobody finds what others have asked
    num_slots: int | None = None  # fewer than the target's pool has, to make slots scarce; None = all of them
    first_slot: int = NULL_SLOT + 1  # where they begin: engines of disjoint slots may run in turn


def build_engine(
    target: Target,
    limits: EngineLimits,
    vocabulary: Vocabulary,
    drafter: Drafter,
    policy: BudgetPolicy,
    *,
    learning: Learning | None = None,
    costs: CostTable | None = None,
    pace_seconds: float | None = None,
    capture: Capture | None = None,
) -> Engine:
    """An idle engine. `costs` is what those who learn count in; with `capture` trees are pruned by CUDA graphs."""
    slots = SlotPool(limits.num_slots or target.pool.num_slots, target.device, first=limits.first_slot)
    table = SlotTable(limits.max_sequences, limits.max_model_len, target.device)
    draft_stage = DraftStage(
        drafter,
        policy,
        max_budget=limits.max_budget,
        device=target.device,
        pace_seconds=pace_seconds,
        capture=capture,
        max_sequences=limits.max_sequences,
    )
    return Engine(
        target,
        drafter,
        slots=slots,
        table=table,
        scheduler=Scheduler(
            slots,
            table,
            prefill_chunk=limits.prefill_chunk,
            released=draft_stage.stop,
            cache=PrefixCache(target.device, keep=limits.prefix_cache, isolate_clients=limits.isolate_clients),
            tree_nodes=limits.max_budget,
        ),
        draft_stage=draft_stage,
        vocabulary=vocabulary,
        learning=learning,
        costs=costs,
    )


def drafting_sizes(target: Target, limits: EngineLimits) -> DraftingSizes:
    """Room that a drafter needs in this engine."""
    return DraftingSizes(
        max_sequences=limits.max_sequences,
        max_length=limits.max_model_len,
        vocab_size=target.vocab_size,
        num_slots=target.pool.num_slots,
        max_nodes=limits.max_budget,
        device=target.device,
    )


def make_drafter(name: str, target: Target, limits: EngineLimits, weights: TrainedWeights | None = None) -> Drafter:
    """The drafter of that name, sized for the engine."""
    return build_drafter(name, drafting_sizes(target, limits), weights)


def make_policy(costs: Costs | None, limits: EngineLimits) -> BudgetPolicy:
    """A budget by measured cost, or a fixed one where nothing was measured."""
    return FixedBudget(limits.max_budget) if costs is None else CostBudget(costs.verify, costs.drafts)


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device computes it natively, else fp32."""
    native = device.type == "cuda" or can_pack(torch.bfloat16, device)
    return torch.bfloat16 if native else torch.float32
