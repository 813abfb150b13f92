"""adaptree as a process of its own: begun with a file of settings, asked over HTTP, ended as operators end it."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import yaml

from benchmarks import processes
from benchmarks.checkpoint import write_dummy
from benchmarks.processes import PATIENCE_SECONDS
from tests import tuned
from tests.tiny_models import served_by

OPERATOR = {"authorization": "Bearer boss"}
ADAPTREE = (str(Path(sys.executable).with_name("adaptree")),)


class Process(processes.Process):
    """One of them, asked as clients and operators do."""

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=PATIENCE_SECONDS, **{"headers": OPERATOR, **options})

    def state(self) -> Any:
        """Of learning."""
        response = self.ask("GET", "/v1/adaptation")
        assert response.status_code == 200, response.text
        return response.json()

    def official(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_SECONDS)


def write_settings(file: Path, settings: dict[str, Any]) -> tuple[str, ...]:
    """# -> the words of the program that takes this file"""
    settings, words = tuned.program(settings)
    file.write_text(yaml.safe_dump(settings))
    return words


def serving_tiny(root: Path, **more: object) -> Process:
    """A server of a tiny random model, drafting by memory, whose files are in `root`; `more` settings beside."""
    model = write_dummy("tiny", root / "tiny")
    settings = served_by(model, drafter="memory", budget_policy="fixed", max_budget=12)
    sizes = {"state_dir": str(root / "state"), "max_model_len": 2048, "kv_cache": "100MiB", **more}
    words = write_settings(root / "config.yaml", {**settings, **sizes})
    return begin(["serve"], root / "config.yaml", root / "log", program=words)


def begin(words: Sequence[str], config: Path, log: Path, *, program: Sequence[str] = ADAPTREE) -> Process:
    """`adaptree WORDS --config FILE`, or another program that takes them."""
    command = [*program, *words, "--config", str(config)]
    return Process.begin(config.stem, command, log, {**os.environ, "ADAPTREE_ADMIN_KEY": "boss"})
