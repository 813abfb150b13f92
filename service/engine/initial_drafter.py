"""Chooses the shapes of a drafter for a target, and builds the initial drafter from which learning starts.

An initial drafter has copies of the target's last layers and head. Its input layer is solved later from served queries;
until then it drafts nothing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError
from drafters.network.config import DrafterConfig, config_from
from drafters.network.model import SpecBlock
from drafters.trained.specblock import FusedInput, FusedStructure
from drafters.trained_kinds import trained_kind
from drafters.training.initialise import TargetEnd, copy_end
from kernels.families import OF_DRAFTERS
from kernels.layers import dense
from service.engine.modules import decoder_layers, last_norm, matrix_of
from service.engine.weights import has_standard_layers

logger = logging.getLogger(__name__)

_DRAFT_TOKENS = 8192  # size of the draft vocabulary, the default of `adaptree train drafter`


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Create tensors of this context on `device`, with a fixed seed, so that random weights are the same each time. The
    random state outside of the context does not change."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        yield


def drafter_config(model: PreTrainedModel, draft_tokens: int = _DRAFT_TOKENS) -> DrafterConfig:
    """Build the config of a drafter for this target. Raises ValueError for a target that cannot have one."""
    text = model.config.get_text_config()
    # Training is faster if only a block's first entry sees token and condition (docs/training.md).
    shape = {
        **trained_kind("specblock").shape,
        "broadcast": False,
        "draft_vocab_size": min(text.vocab_size, draft_tokens),
    }
    return config_from({"target": layers_for(text), "tap_layers": tap_layers_for(model), **shape})


def layers_for(text: PreTrainedConfig, kind: str = "specblock") -> dict[str, Any]:
    """Build the transformers config of a drafter's layers: the target's own config, or Llama's with the target's sizes
    if the target's family is not in `OF_DRAFTERS`. If checkpoints of this kind of drafter always have layers of one
    family, its model type replaces the target's."""
    family = trained_kind(kind).config.family
    if text.model_type in OF_DRAFTERS:
        own = {name: value for name, value in text.to_dict().items() if name != "_name_or_path"}
        return {**own, "model_type": family, "attention_bias": False, "mlp_bias": False} if family else own
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    others = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    layer = text.per_layer_config[0]  # layers may differ in their heads
    known = {name: getattr(layer, name) for name in (*sizes, *others) if getattr(layer, name, None) is not None}
    known.setdefault("intermediate_size", 2 * known["hidden_size"])  # of a target whose layers all have experts
    return {**LlamaConfig(**known).to_dict(), **({"model_type": family} if family else {})}


def tap_layers_for(model: PreTrainedModel) -> tuple[int, int, int]:
    """Choose a low, a middle and a high layer whose outputs a drafter reads (SpecBlock, section 3.1). The high one is
    the layer before the copied last layers, or the last layer if none are copied."""
    num_layers, copied = model.config.get_text_config().num_hidden_layers, 2 if has_standard_layers(model) else 0
    return min(2, num_layers - 1), num_layers // 2, max(num_layers - 1 - copied, 0)


def target_end(model: PreTrainedModel) -> TargetEnd:
    """Collect the layers, norm and head from which a drafter copies; must be called before the model's weights move
    into a `Target`."""
    output = model.get_output_embeddings()
    assert isinstance(output, torch.nn.Module), "a causal language model has an output layer"
    return TargetEnd(
        layers=list(decoder_layers(model).children()),
        norm=last_norm(model),
        head=dense(matrix_of(output)),
        standard=has_standard_layers(model),
    )


def initial_drafter_for(model: PreTrainedModel, identity: str, folder: Path | None) -> SpecBlock | None:
    """Build an initial drafter for this target if `folder` is None, or if the drafter in it was trained for another
    target of the same shapes. Returns None if the drafter in the folder was trained for this target or cannot be read,
    or if the target cannot have a drafter."""
    if folder is None:
        try:
            return new_initial_drafter(model, drafter_config(model))
        except ValueError as error:
            logger.warning("no trained drafter is possible for this model: %s", error)
            return None
    try:
        found = checkpoint.describe(folder)
    except DrafterError:
        return None  # loading it reports why
    if found.target_identity == identity or not fits(found.config, model):
        return None
    logger.info(
        "drafter %s is of another target; learning starts a new one for target %s while serving", folder, identity
    )
    return new_initial_drafter(model, found.config)


def fits(config: DrafterConfig, model: PreTrainedModel) -> bool:
    """Whether a drafter with this config can be initialised for this target: its shapes are the target's (as with
    drafters of fine-tunes), its tapped layers exist, and its input layer can be solved."""
    text = model.config.get_text_config()
    same = all(
        config.target.get(name) == getattr(text, name, None) for name in ("hidden_size", "vocab_size", "model_type")
    )
    return same and isinstance(config.structure(), FusedStructure) and max(config.tap_layers) < text.num_hidden_layers


@torch.no_grad()
def new_initial_drafter(model: PreTrainedModel, config: DrafterConfig) -> SpecBlock:
    """Build the initial drafter network in the target's dtype, deterministically."""
    with seeded(model.device):
        network = SpecBlock(config)
        network.set_vocabulary(torch.arange(config.draft_vocab_size))
        assert isinstance(network.input_layer, FusedInput), "only a fused input layer can be solved from queries"
        for part in (network.input_layer.condition_proj.weight, network.input_layer.fuse.weight):
            part.zero_()
        for part in network.rank_head[-1].parameters():
            part.zero_()  # all rank classes are equally likely before training
        copy_end(network, target_end(model))
    return network.to(dtype=model.dtype).eval().requires_grad_(False)
