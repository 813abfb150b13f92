"""A small loaded model for the benchmarks' tests, and prompts of many lengths."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from typer import Typer
from typer.testing import CliRunner

from drafters.network import checkpoint
from drafters.network.config import config_from
from drafters.network.model import SpecBlock
from service.assembly import Assembly, assemble
from service.cli import app
from service.config import ServiceConfig
from service.engine.initial_drafter import layers_for
from service.errors import StartupError
from tests.service.engine.harness import step_stats
from tests.tiny_models import SMALL, random_prompts, tiny_model

DRAFT_VOCAB = 64
LENGTHS = (5, 40, 12, 90, 30, 7, 110, 60, 20, 33, 64, 9, 80, 16, 48, 3)


STEP = step_stats(
    6, 3, draft_seconds=0.1, verify_seconds=0.5, other_seconds=0.0, predicted_verify_seconds=0.6, survival_error=0.02
)


def save_two_layers(
    folder: Path, dtype: torch.dtype = torch.float32, *, hidden_size: int = 32, intermediate_size: int = 64
) -> Path:
    """A Llama of two layers."""
    sizes = {**SMALL, "num_hidden_layers": 2, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return tiny_model("llama", folder, dtype=dtype, **sizes)


def settings_for(folder: Path, dtype: str = "float32") -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": str(folder),
            "load_dtype": dtype,
            "device": "cpu",
            "threads": 1,
            "max_model_len": 256,
            "kv_cache": "64MiB",
            "state_dir": folder / "state",
            "adaptation": {"enabled": False},
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


def run_command(*arguments: object, program: Typer = app) -> tuple[int, str]:
    """Exit code and output of `adaptree ...`, of words and paths. Raises StartupError as the command does."""
    environ = {"COLUMNS": "250", "TERM": "dumb", "NO_COLOR": "1", "ADAPTREE_ADAPTATION__ENABLED": "false"}
    runner, root = CliRunner(env=environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    result = runner.invoke(program, [word for argument in arguments for word in str(argument).split()])
    root.handlers[:] = handlers  # those of the command write to a stream that is closed now
    root.setLevel(level)
    if isinstance(result.exception, StartupError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def save_drafter(folder: Path, assembly: Assembly, *, seed: int = 0, **changes: Any) -> Path:
    """A tiny SpecBlock drafter of random weights for this target."""
    torch.manual_seed(seed)
    loaded = assembly.loaded
    described = layers_for(loaded.model.config.get_text_config())
    mask: dict[str, Any] = {"mask_token": 3} if changes.get("silent_first") else {}
    sizes = {"target": described, "tap_layers": (0, 1), "draft_vocab_size": DRAFT_VOCAB, "rank_hidden": 16}
    model = SpecBlock(config_from({**sizes, **mask, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=2.0 / parameter.shape[1] ** 0.5)
    model.set_vocabulary(torch.arange(DRAFT_VOCAB))
    checkpoint.save(folder, model, target_identity=loaded.parts.identity, facts={}, own_head=True)
    return folder
