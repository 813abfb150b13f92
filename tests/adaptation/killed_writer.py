"""Kills a process that stores snapshots and learner states, again and again, and checks what is left each time.

A program of its own: a process with one thread can fork safely, and a test runner's is not one.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from adaptation.checkpoint import SnapshotInfo, SnapshotRing, layout_of
from adaptation.persistence import LearnerCheckpoint

TENSORS = {"w": torch.zeros(200_000)}


class Left(NamedTuple):
    """Versions that a kill has left."""

    snapshot: int
    state: int


def store_for_ever(folder: Path, version: int, told: int) -> None:
    """Tells each version once it is stored, its snapshot and its state."""
    ring = SnapshotRing(folder, size=3)
    states = LearnerCheckpoint(folder)
    while True:
        version += 1
        TENSORS["w"].fill_(version)
        ring.add(SnapshotInfo(version, None, "2026-01-01T00:00:00Z", {}), TENSORS)
        states.save(newest=version, origin=version, condemned=set(), parts={"policy": {"num_queries": version}})
        os.write(told, version.to_bytes(8, "big"))


def kill_once(folder: Path, left: Left, seconds: float) -> Left:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            store_for_ever(folder, left.snapshot, writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    return check(folder, Left(*[int.from_bytes(told[-8:], "big")] * 2) if told else left)


def check(folder: Path, told: Left) -> Left:
    """At most what was being written may be missing, and nothing may be damaged."""
    ring = SnapshotRing(folder, size=3)
    saved = LearnerCheckpoint(folder).load()
    assert saved.complaints == ()
    left = Left(max(ring.versions, default=0), saved.newest)
    assert left.snapshot in (told.snapshot, told.snapshot + 1)
    assert left.state in (told.state, told.snapshot + 1)
    for version in ring.versions:
        tensors = ring.get(version, layout_of(TENSORS)).tensors
        assert torch.equal(tensors["w"], torch.full((200_000,), float(version)))
    return left


def main(folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(0)
    left = Left(0, 0)
    for _ in range(kills):
        left = kill_once(folder, left, rng.uniform(0.01, 0.12))
    assert left.state > 0, "killed before anything was stored"
    print(kills, "kills")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
