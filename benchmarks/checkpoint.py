"""`python -m benchmarks checkpoint`: write a model to measure costs with, and a drafter for it in FOLDER/drafter.

`deepened` makes a model K times as deep: after each of its layers stand copies of it whose two output matrices are
zero, so that they add nothing. A step costs what K times the layers cost, while texts and drafts are those of the model
itself, bit for bit: real text beside an expensive target. The last two layers have no copies, since a new drafter
begins as a copy of these. A trained drafter stays as it is, and reads the same states at the layers' new numbers. A
GGUF file keeps its blocks.

`experts` puts experts in place of each feed-forward, which are all equal to it, behind a random router: a step costs
what that of a mixture of experts does, while texts and drafts are the model's own. The result is of type `mixtral`.

`dummy` writes random weights in a known shape. Texts mean nothing, only costs do. Nothing is downloaded.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, ReaderTensor, dequantize
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from drafters.network import checkpoint
from drafters.network.model import SpecBlock
from kernels.layers import Weight
from service.assembly import device_of
from service.config import LoadedConfig, ServiceConfig
from service.drafter import shipped_folder
from service.engine.initial_drafter import drafter_config, seeded
from service.engine.modules import decoder_layers, matrix_of
from service.engine.weights import describe, gguf_file, load_model, resolve, target_config
from service.errors import StartupError

DRAFTER = "drafter"
"""The subfolder of a checkpoint in which its drafter is."""

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
"""Names of a layer's tensors in a GGUF file."""
_FEED_FORWARD = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.weight")
"""Names of a feed-forward's matrices in a GGUF file."""
_OUTPUTS = re.compile(r"\b(o_proj|down_proj|attn_output|ffn_down)")
"""Parameters through which a layer adds to the hidden states, as transformers and GGUF files name them."""
ZEROED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
"""Types of GGUF files in which zero bytes are zeros."""
_MOST_DRAFT_TOKENS = 32_000
_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
SHAPES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Configurations of known models, by name."""

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write the checkpoint to.")]


def run_deepened(
    loaded: LoadedConfig,
    out: Out,
    copies: Annotated[int, typer.Option(min=2, help="How many times as deep.")] = 4,
) -> bool:
    """Write the configured model K times as deep, and its drafter to fit. Serve both with --model FOLDER --drafter-path
    FOLDER/drafter; a GGUF file becomes FOLDER/NAME-xK.gguf, to be given as --model."""
    config, source = loaded.config, loaded.config.model_source
    described = target_config(source, revision=config.revision)
    file = gguf_file(source)
    if file is not None:
        embedding = write_deepened_file(file, described, copies, out / f"{file.stem}-x{copies}.gguf")
    else:
        model, tokenizer = read_model(config)
        deepened(model, copies).save_pretrained(out)
        tokenizer.save_pretrained(out)
        embedding = matrix_of(model.get_input_embeddings())
    drafter = config.drafter_path or shipped_folder(source)
    if drafter is not None:
        changed = {**described, **_changes(described, copies)}
        _write_drafter(drafter, embedding, described, changed, out / DRAFTER)
    return True


def run_experts(
    loaded: LoadedConfig,
    out: Out,
    experts: Annotated[int, typer.Option(min=2, help="Experts of each layer.")] = 8,
    chosen: Annotated[int, typer.Option(min=1, help="Experts of each row.")] = 2,
) -> bool:
    """Write the configured model with its feed-forwards repeated as experts, and its drafter to fit. Serve both with
    --model FOLDER --drafter-path FOLDER/drafter; a GGUF file becomes FOLDER/NAME-of-N.gguf, to be given as --model."""
    config, source = loaded.config, loaded.config.model_source
    described = target_config(source, revision=config.revision)
    biased = described.get("attention_bias") or described.get("mlp_bias")
    if described["model_type"] not in ("llama", "mistral") or biased:
        raise StartupError("only models of type llama or mistral without biases can have experts")
    if chosen > experts:
        raise StartupError(f"--chosen {chosen}: a row chooses among {experts} experts")
    file = gguf_file(source)
    if file is not None:
        embedding = write_experts_file(file, experts, chosen, out / f"{file.stem}-of-{experts}.gguf")
    else:
        model, tokenizer = read_model(config)
        with_experts(model, experts, chosen).save_pretrained(out)
        tokenizer.save_pretrained(out)
        embedding = matrix_of(model.get_input_embeddings())
    drafter = config.drafter_path or shipped_folder(source)
    if drafter is not None:
        _write_drafter(drafter, embedding, described, {**described, "model_type": "mixtral"}, out / DRAFTER)
    return True


def run_dummy(
    loaded: LoadedConfig,
    out: Out,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "tiny",
) -> bool:
    """Write random weights in a known shape, with a random drafter. Both measure costs only."""
    write_dummy(shape, out, dtype=torch.bfloat16, device=device_of(loaded.config.device))
    return True


def read_model(config: ServiceConfig) -> tuple[PreTrainedModel, Any]:
    """Return the configured model, in its own type, and its tokenizer."""
    if gguf_file(config.model_source) is not None:
        described = describe(config.model_source, revision=None, unverified=False)
        loaded = load_model(described, dtype=torch.bfloat16, device=torch.device("cpu"))
        loaded.model.set_attn_implementation("sdpa")
        return loaded.model.requires_grad_(True), loaded.tokenizer
    source = resolve(config.model_source)
    options = {"revision": config.revision or "main", "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True, **options)
    return model, AutoTokenizer.from_pretrained(source, **options)


def write_dummy(
    shape: str, out: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Path:
    """Write random weights in a known shape and a random drafter, the same each time; returns `out`. Raises
    StartupError for an unknown shape."""
    config, device = dummy_config(shape), torch.device(device)
    with seeded(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(out)
    dummy_tokenizer(config.vocab_size).save_pretrained(out)
    with seeded(device):
        drafter = SpecBlock(drafter_config(model, _MOST_DRAFT_TOKENS))
    identity = checkpoint.identity_of(matrix_of(model.get_input_embeddings()), config.to_dict())
    checkpoint.save(out / DRAFTER, drafter, target_identity=identity, facts={}, own_head=True)
    return out


@torch.no_grad()
def deepened(model: PreTrainedModel, copies: int) -> PreTrainedModel:
    """Return the model `copies` times as deep, in its type and on its device. Raises StartupError where added layers
    would change what it computes."""
    deep = copy.deepcopy(model)
    text, layers = deep.config.get_text_config(), decoder_layers(deep)
    text.update(_changes(text.to_dict(), copies))
    own = list(layers)
    for place, layer in enumerate(layers_in(len(own), copies)):
        if place != place_of(layer, len(own), copies):
            layers.insert(place, added := copy.deepcopy(own[layer]))
            for name in filter(_OUTPUTS.search, dict(added.named_parameters())):
                added.get_parameter(name).zero_()
    tokens = torch.arange(16, device=model.device)[None]
    if not torch.equal(*(one(tokens, use_cache=False).logits for one in (model, deep))):
        raise StartupError(f"model type {text.model_type!r} cannot be deepened: its layers add more than two products")
    return deep


@torch.no_grad()
def with_experts(model: PreTrainedModel, experts: int, chosen: int) -> PreTrainedModel:
    """Return a Llama without biases as a mixture of experts that are all equal to its feed-forward, in its type and on
    its device. The weights of a row's chosen ones add up to 1, so logits are the model's own but for rounding."""
    own = {**model.config.get_text_config().to_dict(), "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    config = AutoConfig.for_model(**own, num_local_experts=experts, num_experts_per_tok=chosen)
    with seeded(model.device):
        sparse: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=model.dtype).to(model.device)
    parameters = dict(sparse.named_parameters())
    for name, weight in model.named_parameters():
        experts_of = name.partition(".mlp.")[0] + ".mlp.experts."
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            part = parameters[f"{experts_of}gate_up_proj"].chunk(2, dim=1)["up_proj" in name]
        else:
            part = parameters[f"{experts_of}down_proj" if name.endswith("down_proj.weight") else name]
        part.copy_(weight)
    return sparse


def write_experts_file(file: Path, experts: int, chosen: int, out: Path) -> Weight:
    """Write a GGUF file of `with_experts`, its blocks as they are; returns the embedding. # -> [vocab, hidden]"""
    reader, generator = GGUFReader(file), np.random.default_rng(0)
    counts = {"expert_count": experts, "expert_used_count": chosen}
    added = {f"llama.{name}": MetadataDetails(GGUFValueType.UINT32, count) for name, count in counts.items()}
    tensors = list[ReaderTensor]()
    for tensor in reader.tensors:
        matrix = _FEED_FORWARD.fullmatch(tensor.name)
        repeated = np.broadcast_to(tensor.data, (experts, *tensor.data.shape))
        tensors.append(tensor._replace(name=f"{matrix[1]}_exps.weight", data=repeated) if matrix else tensor)
        if matrix and tensor.name.endswith("ffn_gate.weight"):
            router = generator.standard_normal((experts, int(tensor.shape[0])), np.float32) / 50
            kind, name = GGMLQuantizationType.F32, f"{matrix[1]}_inp.weight"
            tensors.append(tensor._replace(name=name, tensor_type=kind, data=router))
    return _write_changed(reader, "llama", tensors, added, out)


def write_deepened_file(file: Path, described: Mapping[str, Any], copies: int, out: Path) -> Weight:
    """Write a GGUF file of `copies` times the layers, its blocks as they are; returns the embedding. `described`:
    transformers config of its decoder. Raises StartupError for what such a file cannot hold. # -> [vocab, hidden]"""
    lists = (value for value in _changes(described, 1).values() if isinstance(value, list))
    reader = GGUFReader(file)
    if any(one != value[0] for value in lists for one in value):
        raise StartupError(f"{file.name}: only files whose layers are all alike can be deepened; give another --model")
    architecture = reader.fields["general.architecture"].contents()
    count = reader.fields[f"{architecture}.block_count"]
    changed = {count.name: MetadataDetails(count.types[0], copies * count.contents())}
    tensors = [deep for tensor in reader.tensors for deep in _deep_tensors(tensor, count.contents(), copies)]
    return _write_changed(reader, architecture, tensors, changed, out)


def _write_changed(
    reader: GGUFReader, architecture: str, tensors: list[ReaderTensor], changed: dict[str, MetadataDetails], out: Path
) -> Weight:
    """Write a file with other tensors and other fields; returns the embedding. # -> [vocab, hidden]"""
    reader.tensors = tensors
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(out, architecture, endianess=reader.endianess)
    writer.data_alignment = reader.alignment
    copy_with_new_metadata(reader, writer, changed, [])
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    return torch.from_numpy(dequantize(embedding.data, embedding.tensor_type).copy())


def _deep_tensors(tensor: ReaderTensor, layers: int, copies: int) -> list[ReaderTensor]:
    """Return a tensor for each layer that its own becomes. Raises StartupError for a type without known zeros."""
    layer = _LAYER.fullmatch(tensor.name)
    if layer is None:
        return [tensor]
    is_output = _OUTPUTS.search(tensor.name) is not None
    if is_output and tensor.tensor_type.name not in ZEROED:
        raise StartupError(f"{tensor.name}: zeros of type {tensor.tensor_type.name} are not known")
    data = np.zeros(tensor.data.shape, tensor.data.dtype) if is_output else tensor.data
    places = [place for place, one in enumerate(layers_in(layers, copies)) if one == int(layer[1])]
    own, *others = (f"blk.{place}.{layer[2]}" for place in places)
    return [tensor._replace(name=own), *(tensor._replace(name=name, data=data) for name in others)]


def _write_drafter(
    folder: Path, embedding: Weight, described: Mapping[str, Any], changed: Mapping[str, Any], out: Path
) -> None:
    """Write a drafter for a changed model that reads the states it was trained on at their layers' new numbers;
    `described`, `changed`: transformers configs of the decoders. Raises StartupError. # embedding [vocab, hidden]"""
    try:
        own = checkpoint.describe(folder)
        weights = checkpoint.read_weights(folder, own.config)
    except checkpoint.DrafterError as error:
        raise StartupError(str(error)) from error
    if own.target_identity != checkpoint.identity_of(embedding, described):
        raise StartupError(f"drafter {folder} was trained for another model than the one that is changed")
    layers, taps = described["num_hidden_layers"], own.config.tap_layers
    copies = changed["num_hidden_layers"] // layers
    target = {**own.config.target, **_changes(own.config.target, copies)}
    config = replace(own.config, target=target, tap_layers=tuple(place_of(one, layers, copies) for one in taps))
    identity = checkpoint.identity_of(embedding, changed)
    checkpoint.save_weights(out, config, weights, target_identity=identity, facts={**own.facts, "deepened": copies})


def _changes(described: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """Return what differs in the config of a decoder of `copies` times the layers: their number, and lists with an
    entry for each."""
    number = described["num_hidden_layers"]
    lists = {name: value for name, value in described.items() if isinstance(value, list) and len(value) == number}
    repeated = {name: [value[layer] for layer in layers_in(number, copies)] for name, value in lists.items()}
    return {**repeated, "num_hidden_layers": copies * number}


def layers_in(layers: int, copies: int) -> list[int]:
    """Return the layer at each place of a model `copies` times as deep: itself at the first of its places."""
    alone = min(2, layers - 1)  # at the end, without copies; the one before them has theirs too
    first = [min(place // copies, layers - alone - 1) for place in range(copies * layers - alone)]
    return [*first, *range(layers - alone, layers)]


def place_of(layer: int, layers: int, copies: int) -> int:
    """Return the place of a layer itself, see `layers_in`."""
    return layers_in(layers, copies).index(layer)


def dummy_config(shape: str) -> PreTrainedConfig:
    """Return the configuration of a known shape. Raises StartupError for an unknown one."""
    if shape.lower() not in SHAPES:
        raise StartupError(f"--shape {shape}: choose one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape.lower()]
    config: PreTrainedConfig = AutoConfig.for_model(
        **sizes, eos_token_id=sizes["vocab_size"] - 1, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False
    )
    return config


def dummy_tokenizer(vocab_size: int) -> FastTokenizer:
    """Return a tokenizer of bytes, an artificial word for every other id, and an end-of-text at the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *(f"Ġ{number}" for number in range(len(alphabet), vocab_size - 1))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return FastTokenizer(tokenizer_object=backend, eos_token="<|end|>", chat_template=_TEMPLATE)
