"""Building the engine's parts and measuring what they cost on this machine. Takes plain values, no configuration."""

from dataclasses import dataclass

import torch

from drafters.protocol import Drafter
from drafters.registry import DraftingSizes, TrainedWeights, build_drafter
from drafters.tree import MAX_DEPTH, MAX_NODES, ROOT, DraftTree
from service.engine import cost
from service.engine.budget import BudgetPolicy, CostBudget, FixedBudget
from service.engine.drafting import DraftStage
from service.engine.engine import Engine, Vocabulary
from service.engine.kv_pool import KVPool
from service.engine.rehearsal import Rehearsal
from service.engine.rows import Chain
from service.engine.scheduler import Scheduler
from service.engine.slots import SlotPool, SlotTable
from service.engine.target import Target
from service.engine.weights import LoadedModel

_COST_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_COST_CONTEXTS = (128, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes of an engine's tables."""

    max_model_len: int
    max_sequences: int
    prefill_chunk: int
    max_budget: int
    num_slots: int | None = None  # fewer than the target's pool has, to make slots scarce; None = all of them


def build_target(loaded: LoadedModel, num_slots: int, *, tap_layers: tuple[int, ...] = ()) -> Target:
    """A target with its key/value pool; its row multiple is still to be settled."""
    pool = KVPool(loaded.kv_shape, num_slots, loaded.model.device)
    return Target(loaded.model, pool, row_multiple=1, tap_layers=tap_layers)


def build_engine(
    target: Target, limits: EngineLimits, vocabulary: Vocabulary, drafter: Drafter, policy: BudgetPolicy
) -> Engine:
    """An idle engine around a target."""
    slots = SlotPool(limits.num_slots or target.pool.num_slots, target.device)
    table = SlotTable(limits.max_sequences, limits.max_model_len, target.device)
    draft_stage = DraftStage(drafter, policy, max_budget=limits.max_budget, device=target.device)
    return Engine(
        target,
        drafter,
        slots=slots,
        table=table,
        scheduler=Scheduler(slots, table, prefill_chunk=limits.prefill_chunk, released=draft_stage.stop),
        draft_stage=draft_stage,
        vocabulary=vocabulary,
    )


def make_drafter(name: str, target: Target, limits: EngineLimits, weights: TrainedWeights | None = None) -> Drafter:
    """The drafter of that name, sized for the engine."""
    sizes = DraftingSizes(
        max_sequences=limits.max_sequences,
        max_length=limits.max_model_len,
        vocab_size=target.vocab_size,
        num_slots=target.pool.num_slots,
        max_nodes=limits.max_budget,
    )
    return build_drafter(name, sizes, device=target.device, weights=weights)


def make_policy(costs: cost.CostTable | None, limits: EngineLimits) -> BudgetPolicy:
    """A budget by measured cost, or a fixed one where nothing was measured."""
    return FixedBudget(limits.max_budget) if costs is None else CostBudget(costs)


def measure_costs(target: Target, limits: EngineLimits) -> cost.CostTable:
    """Seconds of a verify by rows and context length, on this machine with this model."""
    spare = target.pool.num_slots - 1 - MAX_NODES - _COST_CONTEXTS[0]
    longest = max(1, min(limits.max_model_len - MAX_DEPTH - 1, spare))
    contexts = sorted({min(context, longest) for context in _COST_CONTEXTS})
    rehearsal = Rehearsal(target, lines=len(contexts), max_length=longest + MAX_DEPTH + 1)
    for line, context in enumerate(contexts):
        rehearsal.read(line, rehearsal.random_tokens(context), chunk=limits.prefill_chunk)

    def run(rows: int, context: int) -> None:
        root = Chain(contexts.index(context), context, [0], completes=True)
        rehearsal.verify([root], _broad_tree(rows - 1, target.device))

    return cost.measure(run, _COST_ROWS, contexts).to(target.device)


def _broad_tree(nodes: int, device: torch.device) -> DraftTree:
    """A tree of so many nodes, eight to a level, all of a level below the first of the one above."""
    index = torch.arange(nodes)
    parents = torch.where(index < 8, ROOT, (index // 8 - 1) * 8)
    return DraftTree.of(torch.zeros_like(index)[None], parents[None]).to(device)


def free_bytes(device: torch.device) -> int:
    """Device memory that is free now; 0 on a CPU, where the pool's size is set in GiB."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the device computes it natively, else fp32."""
    native = device.type == "cuda" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if native else torch.float32
