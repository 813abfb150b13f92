"""adaptree as a process of its own: begun with a file of settings, asked over HTTP, ended as operators end it."""

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, cast

import httpx2 as httpx
import openai
import yaml

from benchmarks.checkpoint import write_dummy
from service.bench import servers
from service.bench.servers import PATIENCE_SECONDS
from tests import tuned
from tests.tiny_models import served_by

OPERATOR = {"authorization": "Bearer boss"}
_SERVERS = multiprocessing.get_context("forkserver")
_SERVERS.set_forkserver_preload(["tests.processes", "service.serve"])


class Forked:
    """`adaptree` in a process forked from one that has done the imports, which take longer than most tests. It has the
    part of Popen's interface that `Process` uses."""

    def __init__(self, words: Sequence[str], numbers: Mapping[str, object], log: Path) -> None:
        log.write_text("")
        environ = {**os.environ, "ADAPTREE_ADMIN_KEY": "boss"}
        self._process = _SERVERS.Process(target=_adaptree, args=(words, numbers, log, environ))
        self._process.start()
        self.pid: int = self._process.pid or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("adaptree", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _adaptree(words: Sequence[str], numbers: Mapping[str, object], log: Path, environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with log.open("a") as stream:
        os.dup2(stream.fileno(), sys.stdout.fileno())
        os.dup2(stream.fileno(), sys.stderr.fileno())
    sys.argv = ["adaptree", *words]
    tuned.run(numbers)


class Process(servers.Process):
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


def write_settings(file: Path, settings: dict[str, Any]) -> Mapping[str, object]:
    """Write a server's settings. # -> the numbers among them that are fixed in deployments, for `begin`"""
    knobs: Mapping[str, object] = settings.get("adaptation", {})
    numbers = tuned.fixed(knobs)
    kept = {name: value for name, value in knobs.items() if name not in numbers}
    file.write_text(yaml.safe_dump({**settings, "adaptation": kept}))
    return numbers


def serving_tiny(root: Path, **more: object) -> Process:
    """A server of a tiny random model, drafting by memory, whose files are in `root`; `more` settings beside."""
    model = write_dummy("tiny", root / "tiny")
    settings = served_by(model, drafter="memory", budget_policy="fixed", max_budget=12)
    sizes = {"state_dir": str(root / "state"), "max_model_len": 2048, "kv_cache": "100MiB", **more}
    numbers = write_settings(root / "config.yaml", {**settings, **sizes})
    return begin(["serve"], root / "config.yaml", root / "log", numbers=numbers)


def begin(words: Sequence[str], config: Path, log: Path, *, numbers: Mapping[str, object] | None = None) -> Process:
    """`adaptree WORDS --config FILE`, with other fixed numbers."""
    forked = Forked([*words, "--config", str(config)], numbers or {}, log)
    return Process(config.stem, log, cast(Popen[bytes], forked))
