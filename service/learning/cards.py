"""Writes the model cards of drafters (README.md in their folders), and collects the facts of a training run that their
config.json holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafters.network import checkpoint
from drafters.network.config import DrafterConfig
from drafters.training.fit import CURVE_FILE, CurvePoint, Position
from drafters.training.replay import TREE_NODES
from service import __version__
from service.conditions import surroundings


def facts_of(
    data: Mapping[str, Any],
    position: Position,
    points: Sequence[CurvePoint],
    *,
    training: Mapping[str, Any],
    device: torch.device,
    num_processes: int,
) -> dict[str, Any]:
    """Collect the provenance and scores of trained weights as JSON values. `data`: the features' manifest."""
    return {
        "target": data["target"],
        "data": data,
        "training": {
            **training,
            "steps": position.step,
            "skipped_steps": position.skipped,
            "epochs": position.epoch,
            "tokens_seen": position.tokens,
            "minutes": round(position.seconds / 60, 1),
        },
        "scores": asdict(points[-1].scores),
        "scores_at_start": asdict(points[0].scores),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
        "processes": num_processes,
        "adaptree": __version__,
        **surroundings(),
    }


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the model card of a trained drafter: the main facts, and the sources of the prompts, which determine their
    licences."""
    data, training = facts["data"], facts["training"]
    weights_bytes = (folder / checkpoint.WEIGHTS_FILE).stat().st_size
    shape = f"{training['num_layers']} layers, blocks of {training['block_size']}"
    rows = {
        "weights": f"{weights_bytes / 1e6:.1f} MB, bf16; {training['draft_vocab_size']} draft tokens, {shape}",
        "trained on": f"{data['response_tokens']:,} response tokens of the target; {training['tokens_seen']:,} seen",
        "cost": f"{training['minutes']} minutes, {training['steps']} steps ({training['skipped_steps']} skipped)",
        "machine": f"{facts['machine']}, device {facts['device']}, processes: {facts['processes']}",
        "left out of the method": ", ".join(training["without"]) or "nothing",
        "held-out texts, at the start": _shown(facts["scores_at_start"]),
        "held-out texts, now": _shown(facts["scores"]),
        "versions": ", ".join(f"{name} {facts[name]}" for name in ("adaptree", "torch", "transformers")),
        "command": f"`{facts['command']}`",
        "commit, date": f"{facts['commit']}, {facts['date']}",
    }
    (folder / checkpoint.CARD_FILE).write_text(f"""# A drafter of kind {training["kind"]} for {facts["target"]}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text.

{_table("", rows, "")}

The course of training is in {CURVE_FILE}, all facts are in {checkpoint.CONFIG_FILE}.

## Data

{_table("source of the prompts", data["responses_by_source"], "responses")}

The prompts' licences follow from their sources; the responses are the target's own.
""")


def _shown(scores: Mapping[str, Any]) -> str:
    tau = f"{scores['tree_tau']:.2f} tokens per verify in trees of {TREE_NODES} nodes"
    return f"cross-entropy {scores['loss']:.3f}; {tau}"


def _table(name: str, values: Mapping[str, object], title: str) -> str:
    rows = "\n".join(f"| {key} | {value} |" for key, value in values.items())
    return f"| {name} | {title} |\n|---|---|\n{rows}"


def exported_card(config: DrafterConfig, target: str, facts: Mapping[str, object]) -> str:
    """Render the model card of an exported drafter."""
    return f"""---
base_model: {target}
tags: [speculative-decoding, {config.kind}]
---
# A drafter of kind {config.kind} for {target}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text. Its
licence is the target's, unless its terms say otherwise. It was learnt from what a server's clients asked: pass it on as
you would pass on their texts.

{_table("", facts, "")}

Serve with it: `adaptree serve --model MODEL --drafter-path FOLDER`.
"""
