"""The drafter network for a loaded target: where its folder is, trained weights from there, or an initial network that
learning will train.

An initial network has shapes that fit the target and copies of the target's last layers and head; its input layer is
solved from served queries later, and until then it drafts nothing.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

import drafters
from drafters.network import checkpoint
from drafters.network.checkpoint import DrafterError, weights_of
from drafters.network.config import SpecBlockConfig
from drafters.network.layers import Embed
from drafters.network.model import SpecBlock
from drafters.network.served import ServingNetwork
from drafters.network.structure import InputLayer
from drafters.published import folders as published
from drafters.registry import TrainedWeights
from drafters.trained_kinds import TRAINED_KINDS
from drafters.training.initialise import TargetEnd, copy_end
from kernels.decoder_layer import FUSED_FAMILIES
from kernels.layers import Weight, dense, look_up
from service.config import ServiceConfig
from service.engine.modules import decoder_layers
from service.engine.modules import weights_of as target_weights_of
from service.engine.weights import EMBEDDED_NAME, LoadedModel, has_standard_layers
from service.errors import StartupError

logger = logging.getLogger(__name__)

_DRAFT_TOKENS = 8192  # as `train drafter`
_HASH_LENGTH = 16


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Make the random weights created in this block the same each time, on their device; other randomness is kept."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        yield


def shipped_folder(model_name: str) -> Path | None:
    """The folder of the weights that come with this package for a target, if there are any."""
    if model_name != EMBEDDED_NAME:
        return None
    folder = Path(drafters.__file__).parent / "shipped" / model_name
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def kind_in(folder: Path | None) -> str:
    """Kind of the drafter in a folder. Without a readable one the default kind: loading it reports what is wrong."""
    try:
        return "specblock" if folder is None else published.kind_of(folder)
    except DrafterError:
        return "specblock"


def shipped_by_target(config: ServiceConfig) -> Path | None:
    """The target's own folder, if a drafter was published with it and it has been downloaded."""
    try:
        found = cached_file(
            config.model_source, checkpoint.CONFIG_FILE, revision=config.revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None  # loading the model reports why
    folder = None if found is None else Path(found).parent
    published_here = folder is not None and published.form_of(folder) is not None
    return folder if published_here and TRAINED_KINDS[kind_in(folder)].with_target else None


def imported_folder(config: ServiceConfig) -> Path | None:
    """The folder of the drafter that was imported for the configured model, if one was."""
    folder = import_place(config)
    return folder if (folder / checkpoint.CONFIG_FILE).is_file() else None


def import_place(config: ServiceConfig) -> Path:
    """The folder that a drafter for the configured model is imported to."""
    return config.state_dir / "drafters" / hashlib.sha256(source_of(config).encode()).hexdigest()[:_HASH_LENGTH]


def source_of(config: ServiceConfig) -> str:
    """The configured model by an absolute path, or by its name where it is no local folder."""
    path = Path(config.model_source).expanduser()
    is_local = config.model_source != EMBEDDED_NAME and path.exists()
    return str(path.resolve()) if is_local else config.model_source


@dataclass(frozen=True, slots=True)
class Replaceable:
    """A drafter network whose weights may be replaced while it serves."""

    weights: TrainedWeights
    first: Mapping[str, Tensor]  # by name
    made: bool = True  # False: it drafts nothing before its weights have been trained on served queries
    given: Mapping[str, Tensor] | None = None  # trained for another target, and may fit this one


def load_replaceable(folder: Path, loaded: LoadedModel, *, blocks: int) -> Replaceable:
    """Load the drafter network on the target's device, in the target's type. Raises StartupError."""
    try:
        first = weights_of(model := load_network(folder, loaded))
    except DrafterError as error:
        raise StartupError(str(error)) from error
    weights = _serving(model, loaded.parts.table, blocks, in_8_bits=loaded.is_quantised)
    shape = model.config.kind, weights.blocks, model.config.block_size
    logger.info("loaded drafter %s: %s, %d blocks of %d positions", folder, *shape)
    return Replaceable(weights, first)


def initial_replaceable(loaded: LoadedModel, folder: Path | None, *, blocks: int) -> Replaceable:
    """The initial drafter of this target, with the weights of a folder as a candidate. Raises StartupError."""
    assert loaded.initial_drafter is not None, "the target was loaded without an initial drafter"
    weights = _serving(loaded.initial_drafter, loaded.parts.table, blocks, in_8_bits=loaded.is_quantised)
    given = None if folder is None else _given(folder, loaded)
    return Replaceable(
        replace(weights, ready=lambda: False), weights_of(loaded.initial_drafter), made=False, given=given
    )


def _given(folder: Path, loaded: LoadedModel) -> Mapping[str, Tensor]:
    """Weights that were trained for another target."""
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
    """Looks tokens up in the target's embedding, on its device. # tokens [...] int64 -> [..., hidden]"""
    return partial(look_up, weight=table)


def load_network(folder: Path, loaded: LoadedModel) -> SpecBlock:
    """Load the network as it is trained. Raises DrafterError."""
    return published.load(folder, loaded.parts, dtype=loaded.model.dtype, device=loaded.model.device)


def drafter_config(
    model: PreTrainedModel, draft_tokens: int = _DRAFT_TOKENS, kind: str = "specblock"
) -> SpecBlockConfig:
    """Shapes of a drafter for this target. Raises ValueError for a target that cannot have one."""
    text = model.config.get_text_config()
    size = min(text.vocab_size, draft_tokens)
    # Training is faster where only a block's first entry sees token and condition: docs/training.md.
    shape = {**TRAINED_KINDS[kind].shape, "broadcast": False}
    return SpecBlockConfig(layers_for(text, kind), tap_layers_for(model), draft_vocab_size=size, kind=kind, **shape)


def layers_for(text: PreTrainedConfig, kind: str = "specblock") -> dict[str, Any]:
    """The config of a drafter's layers: the target's own without its path, as layers of the family that the kind is
    published with, if any; or Llama's in the target's sizes where the target's layers are not among `FUSED_FAMILIES`.
    """
    family = TRAINED_KINDS[kind].family
    if text.model_type in FUSED_FAMILIES:
        own = {name: value for name, value in text.to_dict().items() if name != "_name_or_path"}
        return {**own, "model_type": family, "attention_bias": False, "mlp_bias": False} if family else own
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    others = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
    known = {name: getattr(text, name) for name in (*sizes, *others) if getattr(text, name, None) is not None}
    return {**LlamaConfig(**known).to_dict(), **({"model_type": family} if family else {})}


def tap_layers_for(model: PreTrainedModel) -> tuple[int, int, int]:
    """A low, a middle and a high layer whose outputs a drafter reads (SpecBlock section 3.1): the high one feeds the
    copied last layers, or is the last layer where none are copied."""
    num_layers, copied = model.config.get_text_config().num_hidden_layers, 2 if has_standard_layers(model) else 0
    return min(2, num_layers - 1), num_layers // 2, max(num_layers - 1 - copied, 0)


def target_end(model: PreTrainedModel) -> TargetEnd:
    """The last layers, norm and head that a drafter copies; to be taken before weights move into products."""
    output = model.get_output_embeddings()
    assert isinstance(output, torch.nn.Module), "a causal language model has an output layer"
    return TargetEnd(
        layers=list(decoder_layers(model).children()),
        norm=model.get_decoder().get_submodule("norm"),
        head=dense(target_weights_of(output)["weight"]),
        standard=has_standard_layers(model),
    )


def initial_drafter_for(model: PreTrainedModel, identity: str, folder: Path | None) -> SpecBlock | None:
    """An initial drafter for this target: without a folder, or for one whose drafter was trained for another target of
    the same shapes. None: the folder is this target's, or the target cannot have a drafter."""
    if folder is None:
        try:
            return new_initial_drafter(model, drafter_config(model))
        except ValueError as error:
            logger.warning("no drafter can be made for this model: %s", error)
            return None
    try:
        found = checkpoint.describe(folder)
    except DrafterError:
        return None  # loading it reports why
    if found.target_identity == identity or not fits(found.config, model):
        return None
    logger.info(
        "drafter %s was made for target %s: it serves once it has proved better than the memory", folder, identity
    )
    return new_initial_drafter(model, found.config)


def fits(config: SpecBlockConfig, model: PreTrainedModel) -> bool:
    """Whether a drafter has the shapes of this target, as drafters of its fine-tunes have, layers to copy, and an input
    that can be solved."""
    text = model.config.get_text_config()
    same = all(
        config.target.get(name) == getattr(text, name, None) for name in ("hidden_size", "vocab_size", "model_type")
    )
    solved = config.num_layers > 0 and not config.token_beside and config.mask_token is None
    return same and solved and max(config.tap_layers) < text.num_hidden_layers


@torch.no_grad()
def new_initial_drafter(model: PreTrainedModel, config: SpecBlockConfig) -> SpecBlock:
    """The initial network, in the target's type; the same one each time."""
    with seeded(model.device):
        network = SpecBlock(config)
        network.set_vocabulary(torch.arange(config.draft_vocab_size))
        assert isinstance(network.input_layer, InputLayer), "residual heads are not made from traffic"
        for part in (network.input_layer.condition_proj.weight, network.input_layer.fuse.weight):
            part.zero_()
        for part in network.rank_head[-1].parameters():
            part.zero_()  # all classes of ranks are equally likely before training
        copy_end(network, target_end(model))
    return network.to(dtype=model.dtype).eval().requires_grad_(False)
