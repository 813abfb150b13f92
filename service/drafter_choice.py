"""The choice of the drafter: its kind, the folder of its weights, and how learning makes one where there is none."""

import logging
import re
from functools import lru_cache
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel

from drafters.kinds import Need
from drafters.network.model import SpecBlock
from drafters.registry import TrainedWeights, needs_of, trained_kind_of
from service.config import ServiceConfig
from service.engine import drafter_weights
from service.engine.drafter_weights import (
    import_place,
    imported_folder,
    initial_drafter_for,
    kind_in,
    shipped_by_target,
    shipped_folder,
)
from service.engine.weights import BeginDrafter, LoadedModel
from service.errors import StartupError

logger = logging.getLogger(__name__)

PUBLIC_DRAFTERS = {
    "meta-llama/Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "meta-llama/Llama-3.3-70B-Instruct": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Qwen/Qwen3-14B": "RedHatAI/Qwen3-14B-speculator.eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
}
"""Drafters on the hub that are made for a target, by their cards. `auto` takes them where there is no other."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILES = ("*.json", "*.safetensors", "*.bin")


def starts_drafter(config: ServiceConfig) -> bool:
    """Whether learning makes a drafter from the traffic: it is on, and there are no weights for this target."""
    return config.drafter == "auto" and config.adaptation.enabled and not _folder(config)


def begin_drafter(config: ServiceConfig) -> BeginDrafter | None:
    """The function that creates the drafter that learning trains; None: it trains none."""
    is_trained = config.drafter == "auto" or "weights" in drafter_needs(config.drafter)

    def begin(model: PreTrainedModel, identity: str) -> SpecBlock | None:
        folder = _folder(config)  # the target's own files have been fetched by now
        return initial_drafter_for(model, identity, folder) if folder or starts_drafter(config) else None

    return begin if config.adaptation.enabled and is_trained else None


def _folder(config: ServiceConfig) -> Path | None:
    """The folder of trained weights for this target, if there is one; a drafter on the hub is downloaded. Raises
    StartupError."""
    trained = config.drafter == "auto" or "weights" in drafter_needs(config.drafter)
    if config.drafter_path is not None:
        return local_folder(config.drafter_path) if trained else config.drafter_path
    found = imported_folder(config) or shipped_folder(config.model_source) or shipped_by_target(config)
    return found or (_public_folder(config.model_source) if config.drafter == "auto" else None)


@lru_cache
def _public_folder(model: str) -> Path | None:
    """The folder of the drafter that is known to be published for a model, if it can be had."""
    public = PUBLIC_DRAFTERS.get(model)
    try:
        return None if public is None else local_folder(Path(public))
    except StartupError as error:
        logger.warning("the drafter that is published for %s is not used: %s", model, error)
        return None


@lru_cache
def local_folder(path: Path) -> Path:
    """The folder of a drafter by its path or hub id (ORG/NAME, with @REVISION for another than the newest), in the
    hub's cache. Raises StartupError."""
    if path.exists() or not _HUB_ID.fullmatch(str(path)):
        return path  # loading reports what is missing
    name, _, revision = str(path).partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_FILES)))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(
            f"drafter {path} is no folder here and cannot be fetched from the hub: {reason} Fix: correct drafter_path, "
            "or download it where the network allows and name its folder."
        ) from error


def choose_drafter(config: ServiceConfig, *, starts: bool = False) -> tuple[str, Path | None]:
    """The name of the drafter, and the folder of its weights, if it has any. `starts`: learning can make a drafter.
    Raises StartupError."""
    folder = _folder(config)
    name: str = config.drafter
    if name == "auto":
        name = f"memory+{kind_in(folder)}" if folder or starts else "memory"
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
    if wanted is not None and folder is not None and (kind := kind_in(folder)) != wanted:
        raise StartupError(
            f"drafter {name}: {folder} holds one of kind {kind}: set drafter to auto, {kind} or memory+{kind}"
        )
    return name, folder if "weights" in needs else None


def drafter_needs(drafter: str) -> frozenset[Need]:
    """What a drafter needs to be loaded. Raises StartupError for an unknown one."""
    try:
        return needs_of(drafter)
    except ValueError as error:
        raise StartupError(f"{error}. Fix: change `drafter`.") from error


def load_weights(config: ServiceConfig, folder: Path | None, loaded: LoadedModel) -> TrainedWeights | None:
    """The weights of a trained drafter; None: it has none. Raises StartupError."""
    if loaded.initial_drafter is not None:
        return drafter_weights.initial_replaceable(loaded, folder, blocks=config.draft_blocks).weights
    if folder is not None:
        try:
            return drafter_weights.load_replaceable(folder, loaded, blocks=config.draft_blocks).weights
        except StartupError as error:
            if folder != import_place(config):
                raise
            raise StartupError(f"{error}; it was imported: delete {folder} to do without it") from error
    return None
