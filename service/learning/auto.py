"""Decides at the start whether a server learns while it serves, from its settings and measured costs."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from service.config import ServiceConfig

CHEAP = 0.15
"""Largest share of a plain step that a block of the drafter may take. Beside dearer blocks a drafter that learns gained
nothing (docs/decisions/0175)."""


class Facts(NamedTuple):
    """What a start finds out; by default what speaks for learning."""

    has_weights: bool = True  # whether the drafter has weights to train, or some can be made
    has_room: bool = True  # whether learning takes a small part of the free memory
    drafts: bool = True  # whether trained weights serve
    block_share: float | None = None  # seconds of a drafted block in plain steps; None: not measured yet


def decide(config: ServiceConfig, facts: Facts | None = None) -> tuple[bool, str]:
    """Decide by the first rule that applies. Returns whether learning is on, and `on: REASON` or `off: REASON`."""
    facts = facts or Facts()
    wanted, share = config.adaptation.enabled, facts.block_share or 0.0
    alone = config.adaptation.redis_url is None  # no replica learns for this one
    automatic, block = wanted == "auto", f"a block of the drafter takes {share:.2f} of a plain step"
    rules = (
        (wanted is False, False, "adaptation.enabled is false"),
        (automatic and bool(config.api_keys), False, "there are api_keys, so it needs adaptation.enabled true"),
        (automatic and not config.memory_bytes, False, "memory is off, so answers may not be kept"),
        (automatic and config.budget_policy == "fixed", False, "budget_policy is fixed, so no costs are measured"),
        (automatic and alone and config.adaptation.policy == "never", False, "adaptation.policy is never"),
        (automatic and not facts.has_room, False, "it would take more than a quarter of the free memory"),
        (not facts.has_weights, False, "the drafter has no weights to train"),
        (wanted is True, True, "adaptation.enabled is true"),
        (config.adaptation.learns_together, True, "redis_url is set to learn together"),
        (not facts.drafts, True, "no drafter serves yet, and one is made from traffic"),
        (facts.block_share is None, True, f"unless a block of the drafter takes more than {CHEAP} of a plain step"),
        (share <= CHEAP, True, block),
        (True, False, f"{block}, more than {CHEAP}"),
    )
    return next((on, f"{'on' if on else 'off'}: {reason}") for applies, on, reason in rules if applies)


def kept_facts(config: ServiceConfig) -> Facts | None:
    """Return what the last start with these settings found, or None."""
    try:
        return Facts(*json.loads(facts_file(config).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def facts_file(config: ServiceConfig) -> Path:
    """Return the file that keeps the facts of a start for `adaptree doctor`."""
    drafter = config.drafter, config.drafter_path, config.draft_blocks, decide(config)[0]
    settings = repr((config.model, config.load_dtype, config.device, *drafter)).encode()
    return config.state_dir / "costs" / f"learns-{hashlib.sha256(settings).hexdigest()[:16]}.json"
