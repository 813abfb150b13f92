"""Assembling an engine: load, check numerics, measure cost, wire the stages. Takes plain values, no configuration."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from drafters.protocol import Drafter
from drafters.registry import build_drafter
from drafters.tree import MAX_DEPTH, MAX_NODES, DraftTree
from service.engine import cost
from service.engine.budget import BudgetPolicy, CostBudget, FixedBudget
from service.engine.drafting import DraftStage
from service.engine.engine import Engine, Vocabulary
from service.engine.kv_pool import KVPool, slots_for
from service.engine.numerics import Numerics, settle
from service.engine.rehearsal import Rehearsal
from service.engine.scheduler import Scheduler
from service.engine.slots import SlotPool, SlotTable
from service.engine.target import Target
from service.engine.weights import LoadedModel

logger = logging.getLogger(__name__)

_COST_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_COST_CONTEXTS = (128, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of an engine's tables."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    max_budget: int
    kv_gib: float | None
    kv_share: float | None


def build_target(loaded: LoadedModel, limits: EngineLimits, *, tap_layers: tuple[int, ...] = ()) -> tuple[Target, Numerics]:
    """A target with its key/value pool, and whether its numerics are exact on this machine."""
    device = loaded.model.device
    num_slots = slots_for(
        loaded.kv_shape,
        gib=limits.kv_gib,
        share=limits.kv_share,
        free_bytes=free_bytes(device),
        max_model_len=limits.max_model_len,
        reserve=MAX_NODES,
    )
    target = Target(loaded.model, KVPool(loaded.kv_shape, num_slots, device), row_multiple=1, tap_layers=tap_layers)
    return target, settle(target)


def build_engine(
    target: Target, limits: EngineLimits, vocabulary: Vocabulary, drafter: Drafter, policy: BudgetPolicy
) -> Engine:
    """An idle engine around a target."""
    slots = SlotPool(target.pool.num_slots, target.device)
    table = SlotTable(limits.max_sequences, limits.max_model_len, target.device)
    return Engine(
        target,
        drafter,
        slots=slots,
        table=table,
        scheduler=Scheduler(slots, table, prefill_chunk=limits.prefill_chunk),
        draft_stage=DraftStage(drafter, policy, max_budget=limits.max_budget, device=target.device),
        vocabulary=vocabulary,
    )


def make_drafter(name: str, target: Target, limits: EngineLimits) -> Drafter:
    """The drafter of that name, sized for the engine."""
    return build_drafter(
        name,
        max_sequences=limits.max_sequences,
        max_length=limits.max_model_len,
        vocab_size=target.vocab_size,
        max_nodes=limits.max_budget,
        device=target.device,
    )


def make_policy(name: str, target: Target, limits: EngineLimits) -> BudgetPolicy:
    """The budget policy of that name; "cost" measures the machine first, which takes a few seconds."""
    if name == "fixed":
        return FixedBudget(limits.max_budget)
    return CostBudget(measure_costs(target, limits))


def measure_costs(target: Target, limits: EngineLimits) -> cost.CostTable:
    """Seconds of a verify by rows and context length, on this machine with this model."""
    longest = min(limits.max_model_len, target.pool.num_slots - 2 * MAX_NODES) - MAX_DEPTH - 1
    contexts = sorted({min(context, longest) for context in _COST_CONTEXTS})
    rehearsal = Rehearsal(target, lines=len(contexts), max_length=longest + MAX_DEPTH + 1)
    for line, context in enumerate(contexts):
        rehearsal.read(line, rehearsal.random_tokens(context), start=0, chunk=limits.prefill_chunk)

    def run(rows: int, context: int) -> None:
        rehearsal.verify([contexts.index(context)], [0], [context], _broad_tree(rows - 1, target.device))

    return cost.measure(run, _COST_ROWS, contexts)


def _broad_tree(nodes: int, device: torch.device) -> DraftTree:
    """A tree of so many nodes, eight below the root and eight below each first child."""
    index = torch.arange(nodes, device=device)
    depths = index // 8 + 1
    parents = torch.where(depths > 1, (depths - 2) * 8, -1)
    fields = (torch.zeros_like(index), parents, depths, torch.ones_like(index, dtype=torch.float32))
    return DraftTree(*(values[None] for values in fields), torch.tensor([nodes], device=device))


def free_bytes(device: torch.device) -> int:
    """Device memory that is free now; 0 on a CPU, where the pool's size is set in GiB."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device computes it natively, else fp32."""
    native = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if native else torch.float32


def state_models(state_dir: Path) -> Path:
    """Where unpacked models are cached."""
    return state_dir / "cache"
