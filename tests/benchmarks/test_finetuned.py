"""Fine-tuned checkpoints: other layers below the same embedding, the same for the same seed, in the base's type."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.errors import StartupError
from tests.service.bench.parts import save_two_layers
from tests.tiny_models import random_prompts

Command = Callable[..., tuple[int, str]]
PROMPT = {"id": "wmt21-de-en-3", "messages": [{"role": "user", "content": "Translate into English:\nEs war ein Tag."}]}


def written(file: Path, kind: str) -> Path:
    """What a kind of fine-tune makes its texts from."""
    if kind == "german":
        file.write_text(json.dumps(PROMPT))
    else:
        prompt, answer = random_prompts(2, 12, seed=3)
        line = json.dumps({"id": "a-1", "temperature": 0.0, "prompt": prompt, "response": answer})
        file.write_text(line)
    return file


@pytest.mark.parametrize("kind", ["style", "german", "tools"])
def test_a_fine_tune_changes_the_layers_alone(kind: str, run: Command, tmp_path: Path) -> None:
    base = save_two_layers(tmp_path / "base", torch.bfloat16)
    words = ("--model", base, "--state-dir", tmp_path, "--kind", kind, "--source", written(tmp_path / "texts", kind))
    for out in ("one", "same"):
        assert run("checkpoint", "finetuned", *words, "--steps", 3, "--seed", 5, "--out", tmp_path / out)[0] == 0
    before, after, same = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict()
        for name in ("base", "one", "same")
    )
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert changed == {name for name in before if "proj" in name}
    assert all(
        torch.equal(after[name], same[name]) and after[name].dtype == value.dtype for name, value in before.items()
    )


def test_a_fine_tune_names_what_it_needs(run: Command, tmp_path: Path) -> None:
    base = save_two_layers(tmp_path / "base")
    with pytest.raises(StartupError, match="--kind style needs --source FILE"):
        run("checkpoint", "finetuned", "--model", base, "--state-dir", tmp_path, "--out", tmp_path / "out")
