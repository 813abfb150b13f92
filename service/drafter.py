"""Drafter of a configuration: its kind, the folder of its weights, and the object that drafts. The service builds
drafters nowhere else; `drafters.registry` knows the kinds."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

import drafters
from drafters import folders as published
from drafters.decision import RegretLedger
from drafters.kinds import Need, Parts
from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.config import DrafterConfig
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.protocol import Drafter, DraftingSizes, Observer
from drafters.registry import TrainedWeights, build_drafter, needs_of, trained_kind_of
from drafters.trained_kinds import OF_TARGETS
from kernels.layers import Embedding
from service.config import ServiceConfig
from service.engine.engine import EngineLimits
from service.engine.initial_drafter import initial_drafter_for
from service.engine.kv_pool import KVPool
from service.engine.target import Target
from service.engine.weights import EMBEDDED_NAME, BeginDrafter, LoadedModel
from service.errors import StartupError
from service.learning.auto import decide

logger = logging.getLogger(__name__)

PUBLIC_DRAFTERS = {
    "meta-llama/Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "meta-llama/Llama-3.3-70B-Instruct": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Qwen/Qwen3-14B": "RedHatAI/Qwen3-14B-speculator.eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",
    "openai/gpt-oss-20b": "RedHatAI/gpt-oss-20b-speculator.eagle3",
    "openai/gpt-oss-120b": "RedHatAI/gpt-oss-120b-speculator.eagle3",
}
"""Drafters on the hub that are made for a target, by their cards. `auto` uses them where there is no other."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILES = ("*.json", "*.safetensors", "*.bin")
_HASH_LENGTH = 16
_TRIAL_SLOTS = 16  # slots of a draft model's pool for its first forward; the drafter makes a pool of its own


def choose_drafter(config: ServiceConfig, *, starts: bool = False) -> tuple[str, Path | None]:
    """Return the name of the drafter, and the folder of its weights or None without weights. `starts`: learning can
    make a drafter. Raises StartupError."""
    folder = _folder(config)
    name: str = config.drafter
    if name == "auto":
        name = f"memory+{_kind_in(folder)}" if folder or starts else "memory"
        if name == "memory":
            logger.info("no trained drafter for %s: drafting by memory", config.model)
    needs = drafter_needs(name)
    if "model" in needs and config.drafter_path is None:
        raise StartupError(f"drafter {name} needs a model: set drafter_path to a folder, a .gguf file or a hub id")
    if "weights" in needs and folder is None and not starts:
        raise StartupError(
            f"drafter {name} needs trained weights for {config.model}: set drafter_path, "
            "make them with `adaptree train drafter`, or set drafter to memory"
        )
    wanted = trained_kind_of(name)
    if wanted is not None and folder is not None and (kind := _kind_in(folder)) != wanted:
        raise StartupError(
            f"drafter {name}: {folder} holds a drafter of kind {kind}: set drafter to auto, {kind} or memory+{kind}"
        )
    return name, folder if "weights" in needs else None


def drafter_needs(drafter: str) -> frozenset[Need]:
    """Return what is needed to build a drafter. Raises StartupError for an unknown name."""
    try:
        return needs_of(drafter)
    except ValueError as error:
        raise StartupError(f"{error}. Fix: change `drafter`.") from error


def _wants_weights(config: ServiceConfig) -> bool:
    return config.drafter == "auto" or "weights" in drafter_needs(config.drafter)


def _folder(config: ServiceConfig) -> Path | None:
    """Return the folder of trained weights for this target, or None. A drafter on the hub is downloaded. Raises
    StartupError."""
    if config.drafter_path is not None:
        return local_folder(config.drafter_path) if _wants_weights(config) else config.drafter_path
    found = _imported_folder(config) or shipped_folder(config.model_source) or _folder_of_target(config)
    return found or (_public_folder(config.model_source) if config.drafter == "auto" else None)


def _imported_folder(config: ServiceConfig) -> Path | None:
    """Return the folder of the drafter that release 0.3.0 imported for the configured model, or None."""
    name = hashlib.sha256(source_of(config).encode()).hexdigest()[:_HASH_LENGTH]
    folder = config.state_dir / "drafters" / name
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def source_of(config: ServiceConfig) -> str:
    """Return the configured model as an absolute path, or its name if it is not a local folder."""
    path = Path(config.model_source).expanduser()
    is_local = config.model_source != EMBEDDED_NAME and path.exists()
    return str(path.resolve()) if is_local else config.model_source


def shipped_folder(model_name: str) -> Path | None:
    """Return the folder of the drafter that this package ships for a target, or None."""
    if model_name != EMBEDDED_NAME:
        return None
    folder = Path(drafters.__file__).parent / "shipped" / model_name
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def _folder_of_target(config: ServiceConfig) -> Path | None:
    """Return the target's own folder or GGUF file, if it is here and a drafter was published in it, otherwise None."""
    folder: Path | None = Path(config.model_source).expanduser()
    if folder is not None and folder.suffix not in published.FILES:
        try:
            source, revision = config.model_source, config.revision
            found = cached_file(source, checkpoint.CONFIG_FILE, revision=revision, local_files_only=True)
        except (OSError, ValueError):
            return None  # loading the model reports why
        folder = None if found is None else Path(found).parent
    published_here = folder is not None and folder.exists() and published.form_of(folder) is not None
    return folder if published_here and _kind_in(folder) in OF_TARGETS else None


@lru_cache
def _public_folder(model: str) -> Path | None:
    """Return the folder of the drafter that is known to be published for a model, or None if it cannot be
    downloaded."""
    public = PUBLIC_DRAFTERS.get(model)
    try:
        return None if public is None else local_folder(Path(public))
    except StartupError as error:
        logger.warning("cannot use the drafter that is published for %s: %s", model, error)
        return None


@lru_cache
def local_folder(path: Path) -> Path:
    """Return the folder of a drafter given by its path, or by its hub id (ORG/NAME, with @REVISION for another than the
    newest), which is downloaded to the hub's cache. Raises StartupError."""
    if path.exists() or not _HUB_ID.fullmatch(str(path)):
        return path  # loading reports what is missing
    name, _, revision = str(path).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(
            f"drafter {path} is not a local folder and cannot be downloaded from the hub: {reason} Fix: correct "
            "drafter_path, or download it where the network allows and name its folder."
        ) from error


def _kind_in(folder: Path | None) -> str:
    """Return the kind of the drafter in a folder, or the default kind if it is unreadable, which loading reports."""
    try:
        return "specblock" if folder is None else published.kind_of(folder)
    except DrafterError:
        return "specblock"


def begin_drafter(config: ServiceConfig) -> BeginDrafter | None:
    """Return a factory of the initial drafter that learning trains, or None if learning trains no drafter."""
    if not (decide(config)[0] and _wants_weights(config)):
        return None

    def begin(model: PreTrainedModel, identity: str) -> SpecBlock | None:
        folder = _folder(config)  # the target's own files have been downloaded by now
        return initial_drafter_for(model, identity, folder) if folder or config.drafter == "auto" else None

    return begin


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """Trained drafter, or initial drafter of a target, ready to serve. Its weights may be replaced while it serves."""

    serving: TrainedWeights
    weights: Mapping[str, Any]  # parameters by name, as loaded; quantised ones cannot learn
    made: bool = True  # False: it drafts nothing before its weights have been trained on served queries
    given: Mapping[str, Tensor] | None = None  # weights of a drafter for another target, which may fit this one


def load_drafter(
    folder: Path | None, loaded: LoadedModel, *, blocks: int, learns: bool = False
) -> LoadedDrafter | None:
    """Load the drafter of a folder on the target's device, in the target's dtype. If the target has an initial drafter,
    wrap that one instead, with the folder's weights as a candidate. Quantised blocks of a GGUF file stay as they are,
    as those of the target do, unless the drafter `learns`. Returns None if there is neither. Raises StartupError."""
    initial = loaded.initial_drafter
    try:
        if initial is not None:
            given = None if folder is None else _given(folder, loaded)
            serving = replace(_serving(initial.config, weights_of(initial), loaded, blocks), ready=lambda: False)
            return LoadedDrafter(serving, weights_of(initial), made=False, given=given)
        if folder is None:
            return None
        if folder.suffix in published.FILES and loaded.in_blocks and not learns:
            config, weights = published.load_blocks(folder, loaded.parts, dtype=loaded.model.dtype)
        else:
            model = load_network(folder, loaded)
            config, weights = model.config, weights_of(model)
    except DrafterError as error:
        raise StartupError(str(error)) from error
    serving = _serving(config, weights, loaded, blocks)
    shape = config.kind, serving.blocks, config.block_size
    logger.info("loaded drafter %s: %s, %d blocks of %d positions", folder, *shape)
    return LoadedDrafter(serving, weights)


def load_network(folder: Path, loaded: LoadedModel) -> SpecBlock:
    """Load the network in a folder in its training form. Raises DrafterError."""
    return published.load(folder, loaded.parts, dtype=loaded.model.dtype, device=loaded.model.device)


def _given(folder: Path, loaded: LoadedModel) -> Mapping[str, Tensor]:
    """Load weights that were trained for another target. Raises DrafterError."""
    theirs = checkpoint.describe(folder).target_identity or ""
    parts, (dtype, device) = replace(loaded.parts, identity=theirs), (loaded.model.dtype, loaded.model.device)
    return weights_of(checkpoint.load(folder, parts, dtype=dtype, device=device))


def _serving(config: DrafterConfig, weights: Mapping[str, Any], loaded: LoadedModel, blocks: int) -> TrainedWeights:
    in_place = weights[checkpoint.VOCABULARY].is_cuda
    network = ServingNetwork(config, weights, in_8_bits=loaded.is_quantised, in_place=in_place)
    return TrainedWeights(network, Embedding(loaded.parts.table), blocks=config.blocks(blocks))


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A language model that drafts for the target."""

    model: Target
    fingerprint: str  # hash of its weights


def draft_model_of(loaded: LoadedModel, target: LoadedModel, *, name: str, max_model_len: int) -> DraftModel:
    """Make a loaded model draft for the target. Raises StartupError if its tokens or positions do not fit."""
    difference = tokens_differ(target.tokenizer, loaded.tokenizer)
    if difference is not None:
        raise StartupError(
            f"the draft model {name} has another tokenizer than the target: {difference}; set drafter_path to a model "
            "of the target's family"
        )
    if loaded.max_positions < max_model_len:
        raise StartupError(
            f"the draft model {name} supports {loaded.max_positions} tokens: set max_model_len to at most that"
        )
    if loaded.kv_shape.bytes_per_state:
        raise StartupError(
            f"the draft model {name} has recurrent layers, whose states the branches of a beam cannot share; set "
            "drafter_path to a model that attends in all layers"
        )
    pool = KVPool(loaded.kv_shape, _TRIAL_SLOTS, loaded.model.device)
    return DraftModel(Target(loaded.model, pool, in_8_bits=loaded.in_8_bits), loaded.fingerprint)


def tokens_differ(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """Return the first difference between the contents of two tokenizers, or None. Their end tokens may differ, because
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
    """Return vocabulary, merges and special tokens, each by index."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model: Mapping[str, Any] = json.loads(backend.to_str())["model"] if backend is not None else {}
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        "token": {id_: token for token, id_ in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])},
        "merge": dict(enumerate(model.get("merges") or ())),
        "special token": special,
    }


def make_drafter(
    name: str,
    target: Target,
    limits: EngineLimits,
    weights: TrainedWeights | None = None,
    ledger: RegretLedger | None = None,
    draft_model: DraftModel | None = None,
    observer: Observer | None = None,
) -> Drafter:
    """Build the drafter of that name, sized for the engine. `ledger`: the engine's. With an `observer` it is not
    captured in CUDA graphs. Raises StartupError."""
    sizes = DraftingSizes(
        max_sequences=limits.max_sequences,
        max_length=limits.max_model_len,
        vocab_size=target.vocab_size,
        num_slots=target.pool.num_slots,
        max_nodes=limits.max_budget,
        memory=limits.memory,
        device=target.device,
        capture=target.capture,
        ledger=ledger or RegretLedger(),
        least_survival=limits.least_survival,
    )
    parts = Parts(
        sizes=sizes if observer is None else replace(sizes, capture=None, observer=observer),
        weights=weights,
        draft_model=None if draft_model is None else draft_model.model.with_pool,
    )
    try:
        return build_drafter(name, parts)
    except ValueError as error:
        raise StartupError(str(error)) from error
