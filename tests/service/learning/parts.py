"""A tiny target with enough layers for the exact start, prompts for it, and its own answers as files."""

import json
from pathlib import Path

import torch

from service.config import ServiceConfig
from tests.service.bench.parts import settings_for
from tests.tiny_models import SMALL, tiny_model

NUM_LAYERS = 8
TAPS = (2, 4, 5)


def save_target(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    """A Llama of eight layers with random weights."""
    sizes = {**SMALL, "num_hidden_layers": NUM_LAYERS, "intermediate_size": 48, "tie_word_embeddings": tied}
    return tiny_model("llama", folder, seed=seed, **sizes)


def settings(target: Path) -> ServiceConfig:
    return settings_for(target).model_copy(update={"max_sequences": 4, "drafter": "memory"})


def write_prompts(file: Path, count: int = 12) -> Path:
    lines = [
        {"id": f"songs-of-{number % 3}-{number}", "task": "chat", "messages": [_message(number)]}
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def write_responses(file: Path, count: int = 12, *, length: int = 24, seed: int = 0) -> Path:
    """Random tokens in the form of answers, of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    with file.open("w") as stream:
        for number in range(count):
            prompt = torch.randint(300, (5 + number % 4,), generator=generator).tolist()
            response = torch.randint(300, (length + number % 7,), generator=generator).tolist()
            line = {"id": f"random-{number}", "task": "t", "temperature": 0.0, "prompt": prompt, "response": response}
            stream.write(json.dumps(line) + "\n")
    return file


def _message(number: int) -> dict[str, str]:
    return {"role": "user", "content": "the other hat " * (number % 4 + 1) + str(number)}
