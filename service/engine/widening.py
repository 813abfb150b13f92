"""A target made dearer that says the same: every hidden unit, head and feed-forward unit stands K times beside itself
(Net2Net: Chen et al., "Net2Net: accelerating learning via knowledge transfer", arXiv 1511.05641, section 3).

Outputs of a linear layer are repeated, its input columns repeated and divided by K, so that each copy computes what the
one did. A step costs what K^2 times the weights cost, while texts and acceptance are those of the model itself: there
the regime of a dear target and a cheap drafter can be measured with real text. K is a power of two, so that the
division is exact; sums run in another order, so that texts may differ in near-ties.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from service.errors import StartupError

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose layers compute nothing that depends on their width but means over it."""


def copies_of(config: PreTrainedConfig) -> int:
    """K of a widened model, 1 of any other."""
    return int(getattr(config, "copies", 1))


@torch.no_grad()
def widened(model: PreTrainedModel, copies: int) -> PreTrainedModel:
    """The model, so many times as wide, on its device and in its type; the head is not tied any more. Copies of a unit
    stand one width apart, so that the first width is the model's own. Raises StartupError for other families."""
    config = copy.deepcopy(model.config)
    if config.model_type not in _FAMILIES:
        raise StartupError(
            f"model type {config.model_type!r} cannot be widened; those that can are {', '.join(_FAMILIES)}"
        )
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for size in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, size, copies * getattr(config, size))
    config.tie_word_embeddings, config.copies = False, copies
    attention = model.config._attn_implementation
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=model.dtype, attn_implementation=attention
        )
    nn.Module.to_empty(made, device=model.device)
    made.generation_config = model.generation_config
    for name, module in made.named_modules():
        _fill(module, model.get_submodule(name), copies)
    return made


def _fill(module: nn.Module, source: nn.Module, copies: int) -> None:
    """The module's own parameters and buffers from those of the one it is K times as wide as."""
    for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        narrow: Tensor = getattr(source, name)
        times = [wide // size for wide, size in zip(value.shape, narrow.shape, strict=True)]
        takes_copies = isinstance(module, nn.Linear) and value.dim() == 2 and times[1] == copies
        value.copy_(narrow.repeat(times) / copies if takes_copies else narrow.repeat(times))
