"""Writes drafters for use elsewhere: what was learnt, or a drafter folder, in our own form or in one that others read.
Loads no model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptation.checkpoint import SNAPSHOTS, Snapshot, read_snapshot
from adaptation.records import Damaged
from adaptation.weights import ANCHOR
from drafters.network import checkpoint
from drafters.network.checkpoint import CARD_FILE, CONFIG_FILE, VOCABULARY, DrafterError
from drafters.network.config import SpecBlockConfig
from drafters.published import folders as published
from drafters.published.form import PublishedForm
from service import __version__
from service.config import ServiceConfig
from service.errors import StartupError
from service.learning.moving import DRAFTER_FILE, Learnt, Origin, checked, learnt, look_at, put

OWN_FORM = "adaptree"


@dataclass(frozen=True, slots=True)
class Exported:
    """A drafter to be written, and what its card says of it."""

    config: SpecBlockConfig
    weights: Mapping[str, Tensor]  # by the names of `checkpoint.weights_of`
    target: str  # name
    target_identity: str
    facts: Mapping[str, Any]
    lines: Mapping[str, object]  # of the card, beside those that every drafter has


def new_folder(out: Path) -> Path:
    """The absolute path of a folder to be written. Raises StartupError if something is there."""
    out = out.expanduser().resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StartupError(f"{out} is there already, and not empty: name another folder with --out")
    return out


def export(config: ServiceConfig, out: Path, *, version: int | None, source: Path | None, form: str = OWN_FORM) -> str:
    """Write the served version, or the given one, as a drafter folder. `source`: path or name of the learning folder,
    or a drafter folder; None: the only learning folder with a version. # -> what was written; raises StartupError"""
    out = new_folder(out)
    if source is not None and (source / CONFIG_FILE).is_file():
        name, drafter = source.name, _of_folder(source)
    else:
        chosen = _chosen(config, source)
        version = _version_of(chosen, version)
        name, drafter = f"version {version}", _of_version(chosen, version)
    writer = _writer(form, drafter)
    put(out, lambda folder: _write(folder, writer, drafter))
    return name


def _writer(form: str, drafter: Exported) -> PublishedForm | None:
    """Return the form to write; None: our own. Raises StartupError."""
    kind = drafter.config.kind
    able = [found for found in published.FORMS if kind in found.writes]
    if form == OWN_FORM:
        return None
    writer = next((found for found in able if found.name == form), None)
    if writer is None:
        names = ", ".join([found.name for found in able] + [OWN_FORM])
        raise StartupError(f"--format {form}: drafters of kind {kind} can be written as {names}")
    return writer


def _write(folder: Path, form: PublishedForm | None, drafter: Exported) -> None:
    """Write config, weights and card. Raises OSError and StartupError."""
    config, weights, identity = drafter.config, drafter.weights, drafter.target_identity
    if form is None:
        stored = checkpoint.HEAD in weights
        checkpoint.save_weights(folder, config, weights, target_identity=identity, facts=drafter.facts, own_head=stored)
    else:
        try:
            published.write(folder, form, config, weights, drafter.target)
        except ValueError as error:
            raise StartupError(f"the drafter cannot be written as {form.name}: {error}") from error
    (folder / CARD_FILE).write_text(_card(folder, form, drafter))


def _of_folder(folder: Path) -> Exported:
    """Return the drafter of a folder in our own form. Raises StartupError."""
    described = checked(folder)
    try:
        weights = checkpoint.read_weights(folder, described.config)
    except DrafterError as error:
        raise StartupError(str(error)) from error
    identity = described.target_identity or "unknown"
    target = str(described.facts.get("target") or f"target {identity}")
    lines = {"drafter folder": folder.name}
    return Exported(described.config, weights, target, identity, described.facts, lines)


def _of_version(chosen: Learnt, version: int) -> Exported:
    """Return a learnt version. Raises StartupError."""
    origin = _origin_of(chosen)
    snapshot = _read(chosen, version, origin)
    info, target = snapshot.info, _shown_name(origin)
    sha256 = next(one["weights_sha256"] for one in chosen.versions if one["version"] == version)
    lineage = {
        "version": version,
        "parent": info.parent,
        "date": info.date,
        "scores": dict(info.scores),
        "origin_sha256": origin.origin_sha256,
        "weights_sha256": sha256,
    }
    versions = {"adaptree": __version__, "torch": str(torch.__version__)}
    facts = {"target": target, "lineage": lineage, "versions": versions}
    parent = (
        "the drafter as deployed"
        if info.parent == ANCHOR
        else f"version {info.parent}"
        if info.parent
        else "nothing that is known"
    )
    scores = ", ".join(f"{name} {value:.3f}" for name, value in info.scores.items())
    lines = {
        "version, date": f"{version}, {info.date}",
        "trained from": parent,
        "tokens per verify, replayed": scores or "none: not judged by the gate",
        "deployed drafter": f"SHA-256 {origin.origin_sha256}" if origin.origin_sha256 else "none: made from traffic",
        "weights as they were served": f"SHA-256 {sha256}",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }
    return Exported(origin.config, snapshot.tensors, target, origin.target_identity, facts, lines)


def _chosen(config: ServiceConfig, source: Path | None) -> Learnt:
    if source is not None:
        named = source if source.is_dir() else config.state_dir / "adaptation" / source
        if not named.is_dir():
            raise StartupError(f"--from {source}: no such folder, nor one in {config.state_dir / 'adaptation'}")
        return look_at(named)
    found = [one for one in learnt(config) if one.versions]
    if not found:
        raise StartupError(
            f"nothing was learnt for {config.model} in {config.state_dir}: name the state_dir of the server that "
            "learnt, or serve with adaptation.enabled true until `adaptree drafter inspect` shows a version"
        )
    if len(found) > 1:
        listed = "".join(f"\n  {one.folder.name}: {_summary(one)}" for one in found)
        raise StartupError(f"several drafters have learnt in {config.state_dir}: choose one with --from{listed}")
    return found[0]


def _summary(one: Learnt) -> str:
    last = one.versions[-1]
    dated = f" of {last['date']}" if last["date"] else ""
    return f"{len(one.versions)} versions, newest {last['version']}{dated}, served {one.served}"


def _version_of(chosen: Learnt, version: int | None) -> int:
    """The version to export. Raises StartupError."""
    listed = ", ".join(map(str, chosen.intact)) or "none"
    if version is None and chosen.served == ANCHOR:
        raise StartupError(
            f"{chosen.folder.name} serves the drafter as it was deployed: copy its folder, "
            f"or name a version with --version (kept: {listed})"
        )
    version = chosen.served if version is None else version
    if version not in [one["version"] for one in chosen.versions]:
        raise StartupError(f"version {version} is not kept in {chosen.folder}: name one with --version ({listed})")
    return version


def _origin_of(chosen: Learnt) -> Origin:
    if chosen.origin is None:
        why = chosen.complaint or f"{DRAFTER_FILE} is missing"
        raise StartupError(
            f"{chosen.folder} does not say what its drafter is like ({why}): start its server once with "
            "adaptation.enabled true, which writes that file"
        )
    return chosen.origin


def _read(chosen: Learnt, version: int, origin: Origin) -> Snapshot:
    """Raises StartupError for a damaged snapshot, or one that does not fit its drafter."""
    try:
        snapshot = read_snapshot(chosen.folder / SNAPSHOTS, version, None)
        found = {name: tuple(value.shape) for name, value in snapshot.tensors.items()}
        if found != checkpoint.shapes_of(origin.config):
            raise Damaged("its tensors do not fit its drafter")
        if not checkpoint.names_tokens(snapshot.tensors[VOCABULARY], origin.config.target_vocab_size):
            raise Damaged(f"{VOCABULARY} names tokens that the target does not have, or one twice")
        return snapshot
    except Damaged as error:
        listed = ", ".join(str(other) for other in chosen.intact if other != version) or "none"
        raise StartupError(
            f"version {version} in {chosen.folder / SNAPSHOTS} cannot be trusted: {error}; name another with --version "
            f"({listed})"
        ) from error


def _shown_name(origin: Origin) -> str:
    """The target's name without the folders of this machine."""
    name = origin.model or f"target {origin.target_identity}"
    return Path(name).name.removesuffix(".gguf") if Path(name).is_absolute() else name


def _card(folder: Path, form: PublishedForm | None, drafter: Exported) -> str:
    """Return the model card of an exported drafter."""
    config, name = drafter.config, OWN_FORM if form is None else form.name
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    rows = {
        "weights": f"{size / 1e6:.1f} MB, bf16; {config.draft_vocab_size:,} draft tokens, {config.num_layers} layers, "
        f"blocks of {config.block_size}",
        "form": name,
        "target identity": drafter.target_identity,
        "licence": "that of the target, unless its terms say otherwise",
        **drafter.lines,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return f"""---
base_model: {drafter.target}
tags: [speculative-decoding, {config.kind}]
---
# A drafter of kind {config.kind} for {drafter.target}

Proposes draft trees for this one target; the target verifies them, so the drafter changes speed and never text.
If it was learnt from what a server's clients asked, pass it on as you would pass on their texts.

| | |
|---|---|
{table}

Serve with it: `adaptree serve --model MODEL --drafter-path FOLDER`.
"""
