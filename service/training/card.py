"""The facts of a trained drafter, as values for its config and as a card for people: data, cost, scores."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from drafters.specblock import checkpoint
from service import __version__
from service.bench.conditions import command_line, commit_of, machine_name
from service.training.fitting import PICTURE_FILE, FitPlan, Fitted, final_scores

CARD_FILE = "README.md"


def write_drafter(fitted: Fitted, plan: FitPlan, *, device: torch.device, num_processes: int) -> None:
    """Weights, config with all facts, and the card."""
    facts = facts_of(fitted, plan, device=device, num_processes=num_processes)
    checkpoint.save(plan.out, fitted.model, target_identity=fitted.identity, facts=facts, own_head=fitted.own_head)
    (plan.out / CARD_FILE).write_text(card(facts, (plan.out / checkpoint.WEIGHTS_FILE).stat().st_size))


def facts_of(fitted: Fitted, plan: FitPlan, *, device: torch.device, num_processes: int) -> dict[str, Any]:
    """Everything that the weights depend on and what they can do, as JSON values."""
    manifest, position = fitted.manifest, fitted.position
    return {
        "target": manifest.target,
        "data": {
            "files": manifest.files,
            "responses_by_source": manifest.responses_by_source,
            "responses_by_task": manifest.responses_by_task,
            "responses_by_temperature": manifest.responses_by_temperature,
            "response_tokens": manifest.response_tokens,
            "tokens": manifest.tokens,
        },
        "training": {
            **plan.describe(),
            **fitted.notes,
            "steps": position.step,
            "skipped_steps": position.skipped,
            "epochs": position.epoch,
            "tokens_seen": position.tokens,
            "minutes": round(position.seconds / 60, 1),
        },
        "scores": asdict(final_scores(fitted)),
        "scores_at_start": asdict(fitted.points[0].scores),
        "machine": {
            "processor": machine_name(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "processes": num_processes,
        },
        "versions": {"adaptree": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "commit": commit_of(Path(__file__).resolve().parents[2]),
        "command": command_line(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def card(facts: Mapping[str, Any], weights_bytes: int) -> str:
    """What a person should know before using the weights."""
    data, training, machine = facts["data"], facts["training"], facts["machine"]
    shape = f"{training['draft_vocab_size']} draft tokens, {training['num_layers']} layers"
    shape += f", blocks of {training['block_size']}"
    processes = "1 process" if machine["processes"] == 1 else f"{machine['processes']} processes"
    without = ", ".join(training["without"]) or "nothing"
    return f"""# A SpecBlock drafter for {facts["target"]}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text.

| | |
|---|---|
| weights | {weights_bytes / 1e6:.1f} MB, bf16; {shape} |
| trained on | {data["response_tokens"]:,} response tokens of the target itself; {training["tokens_seen"]:,} seen |
| cost | {training["minutes"]} minutes, {training["steps"]} steps ({training["skipped_steps"]} skipped) |
| machine | {machine["processor"]}, device {machine["device"]}, {machine["threads"]} threads, {processes} |
| left out of the method | {without} |
| versions | {", ".join(f"{name} {version}" for name, version in facts["versions"].items())} |
| command | `{facts["command"]}` |
| commit, date | {facts["commit"]}, {facts["date"]} |

## Scores on held-out texts

| | at start | now |
|---|---:|---:|
{_score_rows(facts["scores_at_start"], facts["scores"])}

alpha: share of places on the text whose likeliest draft token is the target's. tau: tokens per verify when the
recorded texts are replayed. Places beyond the first are counted only where everything before could have been drafted.

![training curve]({PICTURE_FILE})

## Data

{_table("source of the prompts", data["responses_by_source"])}

{_table("temperature", data["responses_by_temperature"])}

{_table("file", data["files"], "SHA-256")}

The prompts' licences follow from their sources; the responses are the target's own.
"""


def _score_rows(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    rows = [(f"alpha at place {place + 1}", "alpha", place) for place in range(len(now["alpha"]))]
    rows.insert(1, ("ranks 1-4 at place 1", "covered", 0))
    lines = [f"| {title} | {_shown(before[name][at])} | {_shown(now[name][at])} |" for title, name, at in rows]
    plain = {"tau, chain": "chain_tau", "tau, tree of 16 nodes": "tree_tau", "cross-entropy": "loss"}
    lines += [f"| {title} | {_shown(before[name])} | {_shown(now[name])} |" for title, name in plain.items()]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(name: str, values: Mapping[str, object], title: str = "responses") -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
    return f"| {name} | {title} |\n|---|---:|\n{rows}"
