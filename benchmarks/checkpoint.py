"""`python -m benchmarks checkpoint`: write a model to measure costs with, and a drafter for it in FOLDER/drafter.

`widened` makes every hidden unit, head and feed-forward unit of a model stand K times (Net2Net: Chen et al., "Net2Net:
accelerating learning via knowledge transfer", arXiv 1511.05641, section 3). Outputs of a linear layer are repeated; its
input columns are repeated and divided by K, so that each copy computes what the one unit did. A step costs what K^2
times the weights cost, while texts are those of the model itself: real text beside an expensive target. K is a power of
two, so that the division is exact; sums run in another order, so that texts may differ in near-ties.

`dummy` writes random weights in a known shape. Texts mean nothing, only costs do. Nothing is downloaded.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from drafters.specblock import checkpoint
from drafters.specblock.model import SpecBlock
from service.assembly import device_of
from service.config import LoadedConfig, ServiceConfig
from service.engine.drafter_weights import drafter_config, seeded, shipped_folder
from service.engine.weights import resolve
from service.errors import StartupError

DRAFTER = "drafter"
"""The subfolder of a checkpoint in which its drafter is."""

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers depend on their width by means only."""
_MOST_DRAFT_TOKENS = 32_000
_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"
SHAPES: Mapping[str, Mapping[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Configurations of known models, by name."""

Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder to write the checkpoint to.")]


def run_widened(
    loaded: LoadedConfig,
    out: Out,
    copies: Annotated[int, typer.Option(min=2, help="How many times as wide: 2, 4, 8 ...")] = 2,
) -> bool:
    """Write the configured model K times as wide, and its drafter to fit. Serve both with --model FOLDER --drafter-path
    FOLDER/drafter."""
    model, tokenizer = read_model(loaded.config)
    drafter = loaded.config.drafter_path or shipped_folder(loaded.config.model_source)
    write_widened(model, tokenizer, copies, out, drafter)
    return True


def run_dummy(
    loaded: LoadedConfig,
    out: Out,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "tiny",
) -> bool:
    """Write random weights in a known shape, with a random drafter. Both measure costs only."""
    device = device_of(loaded.config.device)
    write_dummy(shape, out, dtype=torch.bfloat16, device=device)
    return True


def read_model(config: ServiceConfig) -> tuple[PreTrainedModel, Any]:
    """Return the configured model, in its own type, and its tokenizer."""
    source = resolve(config.model_source, cache_dir=config.state_dir / "cache")
    options = {"revision": config.revision or "main", "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True, **options)
    return model, AutoTokenizer.from_pretrained(source, **options)


def write_widened(model: PreTrainedModel, tokenizer: Any, copies: int, out: Path, drafter: Path | None) -> None:
    """Write a widened model, and its drafter where it has one. Raises StartupError for what cannot be widened."""
    wide = widened(model, copies)
    wide.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if drafter is not None:
        _write_widened_drafter(drafter, model, wide, out / DRAFTER)


def write_dummy(
    shape: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kind: str = "specblock",
) -> Path:
    """Write random weights in a known shape and a random drafter of this kind, the same each time; returns `out`.
    Raises StartupError for an unknown shape."""
    config, device = dummy_config(shape), torch.device(device)
    with seeded(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(out)
    dummy_tokenizer(config.vocab_size).save_pretrained(out)
    described = drafter_config(model, _MOST_DRAFT_TOKENS, kind)
    with seeded(device):
        drafter = SpecBlock(described)
    checkpoint.save(out / DRAFTER, drafter, target_identity=_identity(model), facts={}, own_head=True)
    return out


@torch.no_grad()
def widened(model: PreTrainedModel, copies: int) -> PreTrainedModel:
    """Return the model `copies` times as wide, in its type and on its device, with an output layer of its own. The
    copies of a unit stand one width apart. Raises StartupError for other families, and unless copies is a power of
    two."""
    config = copy.deepcopy(model.config)
    if config.model_type not in _FAMILIES:
        raise StartupError(
            f"model type {config.model_type!r} cannot be widened; those that can are {', '.join(_FAMILIES)}"
        )
    if copies < 2 or copies.bit_count() != 1:
        raise StartupError(f"--copies {copies}: give 2, 4, 8 or another power of two")
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for size in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, size, copies * getattr(config, size))
    config.tie_word_embeddings = False
    with torch.device("meta"):
        wide: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
    nn.Module.to_empty(wide, device=model.device)
    wide.generation_config = model.generation_config
    for name, module in wide.named_modules():
        _fill(module, model.get_submodule(name), copies)
    wide.eval()
    return wide


def _fill(module: nn.Module, source: nn.Module, copies: int) -> None:
    """Fill a module's own parameters and buffers from the narrow module."""
    for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        narrow: Tensor = getattr(source, name)
        times = [wide // size for wide, size in zip(value.shape, narrow.shape, strict=True)]
        divides = isinstance(module, nn.Linear) and value.dim() == 2 and times[1] == copies
        value.copy_(narrow.repeat(times) / copies if divides else narrow.repeat(times))


def _write_widened_drafter(folder: Path, model: PreTrainedModel, wide: PreTrainedModel, out: Path) -> None:
    """Write the drafter of `model` with states as wide as those of `wide`; its heads and feed-forward units stay as
    they are, so that it becomes K times as expensive where the target becomes K^2 times. Raises StartupError."""
    described = checkpoint.describe(folder)
    if described.target_identity != _identity(model):
        raise StartupError(f"drafter {folder} was trained for another model than the one that is widened")
    hidden, copies = described.config.hidden_size, wide.config.hidden_size // model.config.hidden_size
    target = {**described.config.target, "hidden_size": copies * hidden, "head_dim": wide.config.head_dim}
    config = replace(described.config, target=target)
    weights = checkpoint.read_weights(folder, described.config)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear), "a causal language model has an output layer"
    if "lm_head.weight" not in weights:  # it is the target's, row by row
        weights["lm_head.weight"] = head.weight.detach()[weights[checkpoint.VOCABULARY]].cpu()
    found = {
        name: _widened_weight(name, weights[name], shape, hidden, copies)
        for name, shape in checkpoint.shapes_of(config).items()
    }
    facts = {**described.facts, "widened": copies}
    checkpoint.save_weights(out, config, found, target_identity=_identity(wide), facts=facts)


def _widened_weight(name: str, narrow: Tensor, shape: tuple[int, ...], hidden: int, copies: int) -> Tensor:
    """Repeat each block of `hidden` rows or columns; what stands behind the blocks stays. -> [*shape]"""
    for dim, (size, wanted) in enumerate(zip(narrow.shape, shape, strict=True)):
        blocks = (wanted - size) // ((copies - 1) * hidden)
        states, rest = narrow.split([blocks * hidden, size - blocks * hidden], dim)
        repeated = states.unflatten(dim, (blocks, 1, hidden)) if blocks else states
        if blocks:
            repeated = repeated.repeat_interleave(copies, dim + 1).flatten(dim, dim + 2)
        divides = dim == 1 and "position_queries" not in name
        narrow = torch.cat([repeated / copies if divides else repeated, rest], dim)
    return narrow


def _identity(model: PreTrainedModel) -> str:
    """Return what a drafter knows its target by."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    return checkpoint.identity_of(embedding.weight.detach(), model.config.get_text_config().to_dict())


def dummy_config(shape: str) -> PreTrainedConfig:
    """Return the configuration of a known shape. Raises StartupError for an unknown one."""
    if shape.lower() not in SHAPES:
        raise StartupError(f"--shape {shape}: choose one of {', '.join(SHAPES)}")
    sizes = SHAPES[shape.lower()]
    config = AutoConfig.for_model(
        **sizes, eos_token_id=sizes["vocab_size"] - 1, bos_token_id=None, pad_token_id=None, tie_word_embeddings=False
    )
    assert isinstance(config, PreTrainedConfig)
    return config


def dummy_tokenizer(vocab_size: int) -> FastTokenizer:
    """Return a tokenizer of bytes, an artificial word for every other id, and an end-of-text at the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġ{number}" for number in range(len(alphabet), vocab_size - 1))
    vocabulary = {piece: index for index, piece in enumerate([*alphabet, *words])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer = FastTokenizer(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
