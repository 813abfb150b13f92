"""The choice of the drafter: its kind, the folder of its weights, and how learning makes one where there is none."""

import logging
from pathlib import Path

from transformers import PreTrainedModel

from drafters.kinds import Need
from drafters.registry import TrainedWeights, needs_of, trained_kind_of
from drafters.specblock.model import SpecBlock
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
    """The folder of trained weights for this target, if there is one."""
    shipped = shipped_folder(config.model_source) or shipped_by_target(config)
    return config.drafter_path or imported_folder(config) or shipped


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
