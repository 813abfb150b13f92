"""Builds drafter, draft model and budget policy of an engine from plain values, without the configuration."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from drafters.kinds import Parts
from drafters.protocol import Drafter, DraftingSizes, Observer
from drafters.registry import TrainedWeights, build_drafter
from drafters.regret import RegretLedger
from kernels.cpu import library
from service.engine.budget import BudgetPolicy, CostBudget, FixedBudget
from service.engine.costs import Costs
from service.engine.engine import EngineLimits
from service.engine.kv_pool import KVPool
from service.engine.target import Target
from service.engine.weights import LoadedModel
from service.errors import StartupError

_TRIAL_SLOTS = 16  # of a pool for the first forward; each drafter has a pool of its own


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A language model that drafts for the target."""

    model: Target
    fingerprint: str  # of its weights


def taken_over(loaded: LoadedModel, target: LoadedModel, *, name: str, max_model_len: int) -> DraftModel:
    """Take over a model that will draft for the target. Raises StartupError where its tokens or positions do not
    fit."""
    difference = tokens_differ(target.tokenizer, loaded.tokenizer)
    if difference is not None:
        raise StartupError(
            f"the draft model {name} has another tokenizer than the target: {difference}; set drafter_path to a model "
            "of the target's family"
        )
    if loaded.max_positions < max_model_len:
        raise StartupError(
            f"the draft model {name} was made for {loaded.max_positions} tokens: set max_model_len to no more"
        )
    pool = KVPool(loaded.kv_shape, _TRIAL_SLOTS, loaded.model.device)
    return DraftModel(Target(loaded.model, pool, in_8_bits=loaded.in_8_bits), loaded.fingerprint)


def tokens_differ(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """The first difference between the tokenizers' contents, None where they are the same. Their end tokens may differ:
    only the target's end an answer."""
    ours, theirs = _contents(target), _contents(draft)
    for part in ours:
        one, other = ours[part], theirs[part]
        place = next((key for key in {**one, **other} if one.get(key) != other.get(key)), None)
        if place is not None:
            shown = [repr(found[place]) if place in found else "none" for found in (one, other)]
            return f"{part} {place} is {shown[0]} for the target and {shown[1]} for the draft model"
    return None


def _contents(tokenizer: PreTrainedTokenizerBase) -> dict[str, Mapping[int, object]]:
    """Vocabulary, merges and special tokens, each by index."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model: Mapping[str, Any] = json.loads(backend.to_str())["model"] if backend is not None else {}
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        "token": {id_: token for token, id_ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])},
        "merge": dict(enumerate(model.get("merges") or ())),
        "special token": special,
    }


def drafting_sizes(target: Target, limits: EngineLimits, ledger: RegretLedger | None = None) -> DraftingSizes:
    """Sizes of a drafter's tables in this engine; `ledger`: the server's."""
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
    """Build the drafter of that name, sized for the engine; with an `observer` it is not captured as graphs.
    Raises StartupError."""
    sizes = drafting_sizes(target, limits, ledger)
    parts = Parts(
        sizes=sizes if observer is None else replace(sizes, capture=None, observer=observer),
        weights=weights,
        draft_model=None if draft_model is None else draft_model.model.with_pool,
    )
    try:
        return build_drafter(name, parts)
    except ValueError as error:
        raise StartupError(str(error)) from error


def make_policy(costs: Costs | None, limits: EngineLimits, ledger: RegretLedger) -> BudgetPolicy:
    """A budget by measured cost, or a fixed one where nothing was measured."""
    return FixedBudget(limits.max_budget) if costs is None else CostBudget(costs.verify, costs.drafts, ledger)


def default_dtype(device: torch.device) -> torch.dtype:
    """bf16 where there are kernels for the device, which halves what every step reads; else fp32."""
    return torch.bfloat16 if device.type == "cuda" or library.variant() else torch.float32


def has_block_kernels(device: torch.device) -> bool:
    """Whether there are kernels for the blocks of GGUF files."""
    return device.type == "cpu" and library.variant() is not None
