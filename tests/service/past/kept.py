"""A program that keeps past answers in a file: children that write again and again and are killed, each of which must
find what the one before has left; then this process does so, and says that it is there, until it is killed.

One process for all of it, since imports take longer than the rest; it has one thread when it forks.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

from service.past import file as module
from tests.service.past.parts import eventually, serving
from tests.tiny_models import loaded_tiny, random_prompts

KILLED_AFTER_SECONDS = 0.05, 0.11, 0.17


def write_for_ever(path: Path, reported: BinaryIO) -> None:
    module._LEAST_PAUSE_SECONDS, module._BYTES_PER_SECOND = 0.0, 1 << 40
    (prompt, *_), was_there = random_prompts(2, 20), path.exists()
    with serving(path) as server:
        assert bool(server.tree(prompt).num_nodes.item()) is was_there
        server.answer(prompt)
        eventually(path.exists)
        reported.write(b"written\n")
        reported.flush()
        while True:
            server.answer(prompt, count=2)


def kill_once(path: Path, seconds: float) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(path, os.fdopen(writing, "wb"))
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.readline(), "the writer ended by itself"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(path: Path) -> None:
    loaded_tiny("llama")
    for seconds in KILLED_AFTER_SECONDS:
        kill_once(path, seconds)
        assert not path.with_name(f"{path.name}.set-aside").exists()
    write_for_ever(path, sys.stdout.buffer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
