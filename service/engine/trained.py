"""Loading a trained drafter for a loaded target, with start-up errors that say what to change."""

import logging
from pathlib import Path

from torch import Tensor
from torch.nn.functional import embedding

import drafters
from drafters.registry import TrainedWeights
from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import DrafterError
from service.engine import linear
from service.engine.weights import EMBEDDED_NAME, LoadedModel
from service.errors import StartupError

logger = logging.getLogger(__name__)


def shipped_folder(model_name: str) -> Path | None:
    """Where the weights that come with this package for a target are, if there are any."""
    if model_name != EMBEDDED_NAME:
        return None
    folder = Path(drafters.__file__).parent / "shipped" / model_name
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def tap_layers(folder: Path) -> tuple[int, ...]:
    """Target layers a drafter reads. Raises StartupError."""
    try:
        return checkpoint.read_config(folder).tap_layers
    except DrafterError as error:
        raise StartupError(str(error)) from error


def load_weights(folder: Path, loaded: LoadedModel, *, blocks: int, starts: int, policy: str) -> TrainedWeights:
    """The drafter network on the target's device, in the target's dtype. Raises StartupError."""
    device, dtype = loaded.model.device, loaded.model.dtype
    try:
        model = checkpoint.load(folder, loaded.parts, dtype=dtype, device=device)
    except DrafterError as error:
        raise StartupError(str(error)) from error
    if linear.can_pack(dtype, device):
        linear.pack_linears(model)
    table = loaded.parts.embedding

    def embed(tokens: Tensor) -> Tensor:
        return embedding(tokens, table)

    logger.info("loaded drafter %s: %d blocks of %d positions", folder, blocks, model.config.block_size)
    return TrainedWeights(model, embed, blocks=blocks, starts=starts, policy=policy)
