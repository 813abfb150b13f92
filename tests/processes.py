"""adaptree as a process of its own: begun with a file of settings, asked over HTTP, ended as operators end it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import yaml

from tests import tuned

PATIENCE_SECONDS = 900.0
OPERATOR = {"authorization": "Bearer boss"}
ADAPTREE = (str(Path(sys.executable).with_name("adaptree")),)
_READY = re.compile(r"ready: (\S+)")


@dataclass
class Process:
    """One of them; its log says how it is."""

    name: str
    log: Path
    running: subprocess.Popen[bytes]

    @cached_property
    def ready(self) -> str:
        """What it says behind `ready:`, once it is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.running.poll() is None and time.monotonic() < deadline:
            if (found := _READY.search(self.log.read_text())) is not None:
                return found[1]
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"{self.name} did not become ready:\n{self.log.read_text()[-4000:]}")

    @property
    def url(self) -> str:
        return self.ready.removesuffix("/v1")

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=PATIENCE_SECONDS, **{"headers": OPERATOR, **options})

    def state(self) -> Any:
        """Of learning."""
        response = self.ask("GET", "/v1/adaptation")
        assert response.status_code == 200, response.text
        return response.json()

    def official(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE_SECONDS)

    def kill(self) -> None:
        self.running.kill()
        self.running.wait()

    def end(self) -> None:
        """Ask it to end, if it still runs. Once all is done it ends by that very signal, as servers do."""
        if self.running.poll() is None:
            self.running.send_signal(signal.SIGTERM)
            assert self.running.wait(PATIENCE_SECONDS) in (0, -signal.SIGTERM), self.log.read_text()[-4000:]


def write_settings(file: Path, settings: dict[str, Any]) -> tuple[str, ...]:
    """# -> the words of the program that takes this file"""
    settings, words = tuned.program(settings)
    file.write_text(yaml.safe_dump(settings))
    return words


def begin(words: Sequence[str], config: Path | None, log: Path, *, program: Sequence[str] = ADAPTREE) -> Process:
    """`adaptree WORDS --config FILE`, or another program that takes them; no file where there is none."""
    with log.open("w") as stream:
        environ = {**os.environ, "ADAPTREE_ADMIN_KEY": "boss"}
        command = [*program, *words, *(() if config is None else ("--config", str(config)))]
        return Process((config or log).stem, log, subprocess.Popen(command, stdout=stream, stderr=stream, env=environ))
