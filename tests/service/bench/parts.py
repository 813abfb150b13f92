"""A small loaded model for the benchmarks' tests, and prompts of many lengths."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from tests.tiny_models import EOS_ID, VOCAB_SIZE, random_prompts, save_model

LENGTHS = (5, 40, 12, 90, 30, 7, 110, 60, 20, 33, 64, 9, 80, 16, 48, 3)


def save_two_layers(
    folder: Path, dtype: torch.dtype = torch.float32, *, hidden_size: int = 32, intermediate_size: int = 64
) -> Path:
    """A Llama of two layers: the fastest model in which a wrong key still changes the text."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    save_model(AutoModelForCausalLM.from_config(config), folder, dtype=dtype)
    return folder


def settings_for(folder: Path, dtype: str = "float32") -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": str(folder),
            "load_dtype": dtype,
            "device": "cpu",
            "threads": 1,
            "max_model_len": 256,
            "kv_cache_gib": 0.01,
            "state_dir": folder / "state",
        }
    )


def assembled(folder: Path, dtype: str = "float32") -> Assembly:
    return assemble(settings_for(folder, dtype))


def varied_prompts() -> list[list[int]]:
    """Sixteen prompts, as many as run together in a case."""
    return [prompt for seed, length in enumerate(LENGTHS) for prompt in random_prompts(1, length, seed=seed)]


def written_prompts() -> Iterator[str]:
    """Lines of a prompt file, one of each form."""
    yield '{"id": "a", "task": "t", "messages": [{"role": "user", "content": "that the other"}]}'
    yield '{"id": 2, "turns": ["in the hat", "and again"]}'
    yield '{"prompt": "the line on the table"}'
