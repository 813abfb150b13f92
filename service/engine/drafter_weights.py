"""The drafter network for a loaded target: trained weights from a folder, and where the folders are."""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers.utils.hub import cached_file

import drafters
from drafters import published
from drafters.registry import TrainedWeights
from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import DrafterError, weights_of
from drafters.specblock.model import Embed, SpecBlock
from drafters.specblock.network import ServingNetwork
from drafters.trained_kinds import TRAINED_KINDS
from kernels.linear import Weight, look_up
from service.config import ServiceConfig
from service.engine.weights import EMBEDDED_NAME, LoadedModel
from service.errors import StartupError

logger = logging.getLogger(__name__)

_HASH_LENGTH = 16


def shipped_folder(model_name: str) -> Path | None:
    """Where the weights that come with this package for a target are, if there are any."""
    if model_name != EMBEDDED_NAME:
        return None
    folder = Path(drafters.__file__).parent / "shipped" / model_name
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def kind_in(folder: Path | None) -> str:
    """Of the drafter that a folder holds. What cannot be read or is yet to be made passes for the usual one: whoever
    loads it says what is wrong."""
    try:
        return "specblock" if folder is None else published.kind_of(folder)
    except DrafterError:
        return "specblock"


def shipped_by_target(config: ServiceConfig) -> Path | None:
    """Where the target itself lies, if a drafter was published with it, and it has been downloaded."""
    try:
        found = cached_file(
            config.model_source, checkpoint.CONFIG_FILE, revision=config.revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None  # whoever loads the model says why
    folder = None if found is None else Path(found).parent
    form = None if folder is None else published.form_of(folder)
    return folder if form is not None and TRAINED_KINDS[form.kind].with_target else None


def imported_folder(config: ServiceConfig) -> Path | None:
    """Where the drafter that was imported for the configured model is, if one was."""
    folder = import_place(config)
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def import_place(config: ServiceConfig) -> Path:
    """Where a drafter for the configured model is imported to."""
    return config.state_dir / "drafters" / hashlib.sha256(source_of(config).encode()).hexdigest()[:_HASH_LENGTH]


def source_of(config: ServiceConfig) -> str:
    """The configured model by a name that means the same in every folder: an absolute path, or the name itself."""
    path = Path(config.model_source).expanduser()
    is_local = config.model_source != EMBEDDED_NAME and path.exists()
    return str(path.resolve()) if is_local else config.model_source


@dataclass(frozen=True, slots=True)
class Replaceable:
    """A drafter network whose weights may be replaced while it serves."""

    weights: TrainedWeights
    first: Mapping[str, Tensor]  # by name
    made: bool = True  # False: it has nothing to say before its weights are made from what is served
    given: Mapping[str, Tensor] | None = None  # of another target, which may do for this one


def load_replaceable(folder: Path, loaded: LoadedModel, *, blocks: int) -> Replaceable:
    """The drafter network on the target's device, in the target's type. Raises StartupError."""
    try:
        first = weights_of(model := load_network(folder, loaded))
    except DrafterError as error:
        raise StartupError(str(error)) from error
    weights = _serving(model, loaded.parts.table, blocks, in_8_bits=loaded.is_quantised)
    shape = model.config.kind, weights.blocks, model.config.block_size
    logger.info("loaded drafter %s: %s, %d blocks of %d positions", folder, *shape)
    return Replaceable(weights, first)


def unmade_replaceable(loaded: LoadedModel, folder: Path | None, *, blocks: int) -> Replaceable:
    """The drafter that is yet to be made for this target, or to prove itself: that of a folder. Raises StartupError."""
    assert loaded.unmade is not None, "no drafter is to be made"
    weights = _serving(loaded.unmade, loaded.parts.table, blocks, in_8_bits=loaded.is_quantised)
    given = None if folder is None else _given(folder, loaded)
    return Replaceable(replace(weights, ready=lambda: False), weights_of(loaded.unmade), made=False, given=given)


def _given(folder: Path, loaded: LoadedModel) -> Mapping[str, Tensor]:
    """Weights that were made for another target."""
    try:
        theirs = checkpoint.describe(folder).target_identity or ""
        parts, (dtype, device) = replace(loaded.parts, identity=theirs), (loaded.model.dtype, loaded.model.device)
        return weights_of(checkpoint.load(folder, parts, dtype=dtype, device=device))
    except DrafterError as error:
        raise StartupError(str(error)) from error


def _serving(model: SpecBlock, table: Weight, blocks: int, *, in_8_bits: bool = False) -> TrainedWeights:
    network = ServingNetwork(model.config, weights_of(model), in_8_bits=in_8_bits, in_place=model.d2t.is_cuda)
    return TrainedWeights(network, embed_with(table), blocks=TRAINED_KINDS[model.config.kind].blocks(blocks))


def embed_with(table: Weight) -> Embed:
    """Looking tokens up in the target's table, on the table's device."""
    return partial(look_up, weight=table)


def load_network(folder: Path, loaded: LoadedModel) -> SpecBlock:
    """The network as it is trained. Raises DrafterError."""
    return published.load(folder, loaded.parts, dtype=loaded.model.dtype, device=loaded.model.device)
