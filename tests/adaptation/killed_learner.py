"""Kills a process that learns, at random bytes of what it stores and at random moments, and checks each time what a
later process goes on with.

A program of its own: a process with one thread can fork safely, and a test runner's is not one.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from adaptation.publisher import Gate
from drafters.network.checkpoint import weights_of
from tests.adaptation.crashing import Fuel, running_on
from tests.adaptation.samples import Bench, bench, feedback

ROLLBACK_SHARE = 0.15
MOST_BYTES = 1_500_000  # an update stores about half a million
LONGEST_SECONDS = 0.4


class Deadly(Fuel):
    """Ends the process by SIGKILL when it is spent, in the middle of a file if it comes to that."""

    def run_out(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("outlived SIGKILL")


@dataclass
class Known:
    """What processes have reported before they were killed."""

    weights: dict[int, str] = field(default_factory=dict)  # hash by the version that first had them
    served: int = 0  # the last version that a process had published, or gone back to, to the end
    doing: str = ""  # and what it was at when it was killed
    actions: int = 0

    def observe(self, line: str) -> None:
        reported: dict[str, Any] = json.loads(line)
        match reported["what"]:
            case "storing":
                self.weights[reported["version"]] = reported["weights"]
                self.doing = "publish"
            case "rolling back":
                self.doing = "rollback"
            case "done":
                self.served, self.doing = reported["version"], ""
                self.actions += 1


def hashed(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def resumed(folder: Path) -> Bench:
    process = bench(folder, head_queries=2, head_steps=1, snapshots=3)
    process.learner.restore()
    process.weights.between_steps()
    return process


def learn_for_ever(folder: Path, seed: int, tell: Callable[..., None]) -> None:
    """Publish update after update, and now and then take one back."""
    process, rng = resumed(folder), random.Random(seed)
    ring = process.weights.snapshots
    usual = ring.add

    def add(info: Any, tensors: Mapping[str, Tensor], **named: Any) -> None:
        tell(what="storing", version=info.version, weights=hashed(tensors))
        usual(info, tensors, **named)

    ring.add = add  # type: ignore[method-assign]
    tell(what="done", version=process.weights.origin)
    while True:
        seed += 1
        process.observe(feedback, seed)
        publishes = len(process.events)
        process.update()
        process.weights.between_steps()
        if any(event.kind == "published" for event in process.events[publishes:]):
            tell(what="done", version=process.weights.origin)
        if process.weights.origin and rng.random() < ROLLBACK_SHARE:
            tell(what="rolling back")
            process.learner.rollback()
            process.weights.between_steps()
            tell(what="done", version=process.weights.origin)


def kill_once(folder: Path, known: Known, rng: random.Random) -> None:
    """At a byte or at a moment, whichever comes first."""
    reading, writing = os.pipe()
    seed, fuel, seconds = rng.randrange(10**6), Deadly(rng.randrange(MOST_BYTES)), rng.uniform(0.1, LONGEST_SECONDS)
    child = os.fork()
    if child == 0:

        def tell(**reported: object) -> None:
            os.write(writing, json.dumps(reported).encode() + b"\n")

        try:
            with running_on(fuel):
                learn_for_ever(folder, seed, tell)
        finally:
            os._exit(1)
    os.close(writing)
    deadline = time.process_time() + seconds
    ended = (0, 0)
    while ended == (0, 0) and time.process_time() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.002)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    assert os.WIFSIGNALED(ended[1]), "the learner ended by itself"
    for line in lines:
        known.observe(line)


def check(folder: Path, known: Known) -> None:
    """At most what was being done may be lost, and what is served is what was published, to the bit."""
    later = resumed(folder)
    origin, complaints = later.weights.origin, [event.reason for event in later.events]
    assert complaints in ([], ["same_weights"]), complaints
    assert hashed(weights_of(later.serving)) == known.weights[origin]
    match known.doing:
        case "":
            assert origin == known.served
        case "publish":
            assert origin in (known.served, max(known.weights))
        case "rollback":
            assert origin <= known.served
    assert hashed(weights_of(later.weights.training)) == known.weights[origin]
    known.served, known.doing = origin, ""


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    Gate._reason = lambda *_: "better"  # type: ignore[method-assign]
    known = Known()
    known.weights[0] = hashed(weights_of(bench(folder / "nowhere").serving))
    during: dict[str, int] = {}
    for _ in range(kills):
        kill_once(folder, known, rng)
        during[known.doing] = during.get(known.doing, 0) + 1
        check(folder, known)
    assert known.actions > kills / 2, "killed before anything was done"
    print(kills, "kills;", known.actions, "published or taken back; killed during:", during)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
