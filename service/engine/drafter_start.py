"""The drafter that a target without trained weights begins with: shapes that fit it and the target's own end. Its input
layer is solved from served queries later; until then it has nothing to say."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from drafters.specblock import checkpoint
from drafters.specblock.checkpoint import DrafterError
from drafters.specblock.config import STANDARD, SpecBlockConfig, layers_for
from drafters.specblock.model import SpecBlock
from drafters.specblock.structure import InputLayer
from drafters.trained_kinds import TRAINED_KINDS
from drafters.training.initialise import TargetEnd, copy_end
from kernels.linear import dense
from service.engine.linear import weights_of
from service.engine.modules import decoder_layers, default_tap_layers

logger = logging.getLogger(__name__)

_DRAFT_TOKENS = 8192  # as `train drafter`


def drafter_config(
    model: PreTrainedModel, draft_tokens: int = _DRAFT_TOKENS, kind: str = "specblock"
) -> SpecBlockConfig:
    """Shapes of a drafter for this target. Raises ValueError where it cannot have one."""
    text = model.config.get_text_config()
    known = {name: value for name, value in text.to_dict().items() if name != "_name_or_path"}  # somebody's folder
    size = min(text.vocab_size, draft_tokens)
    # A token and a condition that only a block's first entry sees are learnt from faster: docs/training.md.
    shape = {**TRAINED_KINDS[kind].shape, "broadcast": False}
    return SpecBlockConfig(layers_for(known), tap_layers_for(model), draft_vocab_size=size, kind=kind, **shape)


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Make the random weights created in this block the same each time, on their device; other randomness is kept."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        yield


def tap_layers_for(model: PreTrainedModel) -> tuple[int, int, int]:
    """Where a drafter's layers are copies of the target's last ones, what these receive is tapped; else what leaves."""
    copied = 2 if is_standard(model) else 0
    return default_tap_layers(model.config.get_text_config().num_hidden_layers, copied=copied)


def is_standard(model: PreTrainedModel) -> bool:
    """Whether a drafter's layers can be of the target's kind."""
    return model.config.get_text_config().model_type in STANDARD


def target_end(model: PreTrainedModel) -> TargetEnd:
    """What a drafter copies, before the weights of the model move into products."""
    output = model.get_output_embeddings()
    assert isinstance(output, torch.nn.Module), "a causal language model has an output layer"
    return TargetEnd(
        layers=list(decoder_layers(model).children()),
        norm=model.get_decoder().get_submodule("norm"),
        head=dense(weights_of(output)["weight"]),
        standard=is_standard(model),
    )


def unmade_for(model: PreTrainedModel, identity: str, folder: Path | None) -> SpecBlock | None:
    """The drafter that is yet to be made for this target, or to prove itself: that of a folder which was made for
    another target of the same shapes. None: the folder is this target's, or nothing can come of it."""
    if folder is None:
        try:
            return unmade_drafter(model, drafter_config(model))
        except ValueError as error:
            logger.warning("no drafter can be made for this model: %s", error)
            return None
    try:
        found = checkpoint.describe(folder)
    except DrafterError:
        return None  # whoever loads it says why
    if found.target_identity == identity or not fits(found.config, model):
        return None
    logger.info(
        "drafter %s was made for target %s: it serves once it has proved better than the memory", folder, identity
    )
    return unmade_drafter(model, found.config)


def fits(config: SpecBlockConfig, model: PreTrainedModel) -> bool:
    """Whether a drafter has the shapes of this target, as those made for its fine-tunes have, and layers to copy."""
    text = model.config.get_text_config()
    same = all(
        config.target.get(name) == getattr(text, name, None) for name in ("hidden_size", "vocab_size", "model_type")
    )
    return same and config.num_layers > 0 and max(config.tap_layers) < text.num_hidden_layers


@torch.no_grad()
def unmade_drafter(model: PreTrainedModel, config: SpecBlockConfig) -> SpecBlock:
    """All that is known of a drafter before anything was served, in the target's type; the same one each time."""
    with seeded(model.device):
        network = SpecBlock(config)
        network.set_vocabulary(torch.arange(config.draft_vocab_size))
        assert isinstance(network.input_layer, InputLayer), "residual heads are not made from traffic"
        for part in (network.input_layer.condition_proj.weight, network.input_layer.fuse.weight):
            part.zero_()
        for part in network.rank_head[-1].parameters():
            part.zero_()  # every class of ranks is as likely as any other until it has been taught
        copy_end(network, target_end(model))
    return network.to(dtype=model.dtype).eval().requires_grad_(False)
