"""Building the engine's parts and measuring what they cost on this machine. Takes plain values, no configuration."""

from dataclasses import replace

import torch

from drafters.kinds import Parts
from drafters.protocol import Drafter, DraftingSizes, Observer
from drafters.registry import TrainedWeights, build_drafter
from drafters.regret import RegretLedger
from kernels.cpu import library
from service.engine.budget import BudgetPolicy, CostBudget, FixedBudget
from service.engine.costs.model import Costs
from service.engine.draft_model import DraftModel
from service.engine.engine import EngineLimits
from service.engine.target import Target
from service.errors import StartupError


def drafting_sizes(target: Target, limits: EngineLimits, ledger: RegretLedger | None = None) -> DraftingSizes:
    """Room that a drafter needs in this engine; `ledger`: of its server."""
    return DraftingSizes(
        max_sequences=limits.max_sequences,
        max_length=limits.max_model_len,
        vocab_size=target.vocab_size,
        num_slots=target.pool.num_slots,
        max_nodes=limits.max_budget,
        memory=limits.memory,
        device=target.device,
        capture=target.capture,
        ledger=ledger or RegretLedger(),
    )


def make_drafter(
    name: str,
    target: Target,
    limits: EngineLimits,
    weights: TrainedWeights | None = None,
    ledger: RegretLedger | None = None,
    draft_model: DraftModel | None = None,
    observer: Observer | None = None,
) -> Drafter:
    """The drafter of that name, sized for the engine. With an observer nothing is captured. Raises StartupError."""
    sizes = drafting_sizes(target, limits, ledger)
    parts = Parts(
        sizes=sizes if observer is None else replace(sizes, capture=None, observer=observer),
        weights=weights,
        draft_model=None if draft_model is None else draft_model.model.with_pool,
        first_layers=target.first_layers,
    )
    try:
        return build_drafter(name, parts)
    except ValueError as error:
        raise StartupError(str(error)) from error


def make_policy(costs: Costs | None, limits: EngineLimits, ledger: RegretLedger) -> BudgetPolicy:
    """A budget by measured cost, or a fixed one where nothing was measured."""
    return FixedBudget(limits.max_budget) if costs is None else CostBudget(costs.verify, costs.drafts, ledger)


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where kernels are made for the device, for it halves what every step reads; else fp32."""
    return torch.bfloat16 if device.type == "cuda" or library.variant() else torch.float32


def has_block_kernels(device: torch.device) -> bool:
    """Whether there are kernels for the blocks of GGUF files."""
    return device.type == "cpu" and library.variant() is not None
