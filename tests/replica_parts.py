"""Server processes that share a Redis server, a trainer process beside them, and clients that compare every token.

Knows how to begin and end them and what they say of themselves; what befalls them is defined by the tests.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx

from service.assembly import Assembly
from service.engine.requests import GenerationRequest
from tests import processes
from tests.practised import practised
from tests.processes import OPERATOR, Process, write_settings
from tests.redis_server import RedisServer
from tests.service.learning_parts import EAGER, requests, texts
from tests.tiny_models import random_prompts, served_by

SECRET = "a secret of all replicas"
_TOKENS = 24
_AT_A_TIME = 6
_CHANGES = 10


@dataclass(frozen=True)
class Ground:
    """A target with a drafter that is good at other texts than those that are asked for, a few of them at a time."""

    folder: Path
    settings: Mapping[str, Any]
    asked: Sequence[GenerationRequest]
    plain: Sequence[tuple[int, ...]]


def ground(folder: Path, redis_url: str, **knobs: object) -> Ground:
    assembly = practised(folder / "practised", num_texts=6, updates=1).assembly
    asked = shifted_requests()
    plain = texts(assembly.engine(assembly.drafter("none")), asked)
    return Ground(folder, _settings(assembly, redis_url, **knobs), asked, plain)


def shifted_requests() -> list[GenerationRequest]:
    """One in three is sampled."""
    seeds = range(100, 100 + _AT_A_TIME * _CHANGES)
    prompts = [prompt for seed in seeds for prompt in random_prompts(1, 6, seed=seed)]
    return [
        replace(one, sampling=replace(one.sampling, temperature=float(number % 3 == 2)))
        for number, one in enumerate(requests(prompts, temperature=0.0, tokens=_TOKENS))
    ]


def _settings(assembly: Assembly, redis_url: str, **knobs: object) -> dict[str, Any]:
    config = assembly.config
    learning = {
        **EAGER,
        "enabled": True,
        "learning_rate": 0.005,
        "redis_url": redis_url,
        "redis_secret": SECRET,
        "policy": "never",
        **knobs,
    }
    return served_by(
        Path(config.model),
        drafter="specblock",
        drafter_path=str(config.drafter_path),
        max_model_len=256,
        budget_policy="fixed",
        adaptation=learning,
    )


def begin(site: Ground, name: str, *words: str) -> Process:
    """`adaptree WORDS` with a state of its own; under the same name it goes on where it was."""
    config = site.folder / f"{name}.yaml"
    numbers = write_settings(config, {**site.settings, "state_dir": str(site.folder / name)})
    return processes.begin(words, config, site.folder / f"{name}-{time.monotonic_ns()}.log", numbers=numbers)


@dataclass
class Replica:
    """A server process, and what it says."""

    process: Process
    url: str

    def state(self) -> dict[str, Any]:
        """Of learning. It may wait for an update, but never for Redis."""
        answer = httpx.get(f"{self.url}/adaptation", headers=OPERATOR, timeout=30)
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def command(self, word: str) -> httpx.Response:
        """An operator's."""
        return httpx.post(f"{self.url}/adaptation/{word}", headers=OPERATOR, timeout=30)


@dataclass
class Load:
    """Clients that ask every replica for the same few texts over and over, one request at a time each."""

    site: Ground
    replicas: Sequence[Replica]
    changes: int = 0
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        for number, replica in enumerate(self.replicas):
            self._threads.append(threading.Thread(target=self._ask, args=(replica, number)))
            self._threads[-1].start()

    def end(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def change(self) -> None:
        """To texts that no one has learnt yet: who knows the old ones by heart has nothing left to learn from them."""
        self.changes += 1
        assert self.changes < _CHANGES, "no other texts are left"

    def taken(self) -> list[float]:
        """Seconds of the requests since this was last asked."""
        taken, self.seconds = self.seconds, []
        return taken

    def _ask(self, replica: Replica, turn: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopping.is_set():
                self._ask_once(client, replica, self.changes * _AT_A_TIME + turn % _AT_A_TIME)
                turn += 1

    def _ask_once(self, client: httpx.Client, replica: Replica, number: int) -> None:
        request, began = self.site.asked[number], time.perf_counter()
        body = {
            "model": "tiny",
            "prompt": list(request.prompt),
            "max_tokens": _TOKENS,
            "temperature": request.sampling.temperature,
            "seed": request.sampling.seed,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            answer = client.post(f"{replica.url}/completions", json=body)
            tokens = tuple(answer.json()["choices"][0]["token_ids"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            self.wrong.append(f"{replica.process.name}: {type(error).__name__}: {error}")
            return
        self.seconds.append(time.perf_counter() - began)
        if tokens != self.site.plain[number]:
            self.wrong.append(f"{replica.process.name}: request {number}: {tokens}, not {self.site.plain[number]}")


@dataclass
class Fleet:
    """Three replicas that follow, a trainer, and their clients."""

    site: Ground
    redis: RedisServer
    replicas: list[Replica]
    trainer: Process
    load: Load

    def states(self) -> list[dict[str, Any]]:
        return [replica.state() for replica in self.replicas]

    def newest(self) -> tuple[int, int]:
        """Epoch and number of the newest version that any replica has heard of."""
        return max((state["replicas"]["epoch"], state["replicas"]["number"]) for state in self.states())

    def agree(self, beyond: tuple[int, int] = (0, -1)) -> bool:
        """All serve the same weights, really serve them, and these are newer than a version."""
        states = self.states()
        reported = {(one["replicas"]["epoch"], one["replicas"]["number"]) for one in states}
        hashes = {one["replicas"]["served_sha256"] for one in states}
        hashes |= {one["replicas"]["announced_sha256"] for one in states}
        connected = all(one["replicas"]["connected"] for one in states)
        written = all(one["version"] == one["newest"] for one in states)
        return connected and written and len(reported) == len(hashes) == 1 and reported.pop() > beyond

    def wait(self, done: Callable[[], bool], seconds: float) -> float:
        """# -> seconds it took"""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < seconds, self.report()
            time.sleep(0.1)
        return time.monotonic() - began

    def check(self) -> None:
        """Not one request has failed, and not one token was wrong."""
        assert self.load.wrong == [], self.load.wrong[:3]

    def begin_trainer(self) -> None:
        self.trainer = begin(self.site, "trainer", "trainer", "--redis", self.redis.url)
        assert self.trainer.ready

    def report(self) -> str:
        reported = [state["replicas"] for state in self.states()]
        return "\n".join([*map(str, reported), self.trainer.log.read_text()[-3000:]])


@contextmanager
def fleet(folder: Path, redis: RedisServer, **knobs: object) -> Iterator[Fleet]:
    site = ground(folder, redis.url, **knobs)
    servers = [begin(site, f"replica-{number}", "serve") for number in range(3)]
    trainer = begin(site, "trainer", "trainer", "--redis", redis.url)
    processes = [*servers, trainer]
    try:
        replicas = [Replica(server, server.ready) for server in servers]
        assert trainer.ready
        load = Load(site, replicas)
        load.begin()
        try:
            made = Fleet(site, redis, replicas, trainer, load)
            yield made
            processes.append(made.trainer)
        finally:
            load.end()
        for process in processes:
            process.end()
    finally:
        for process in processes:
            process.kill()
