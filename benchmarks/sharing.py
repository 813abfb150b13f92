"""`python -m benchmarks sharing`: times of forwards of a model in one process and in several, and of sums in pieces
beside sums in one chain, by turns."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import psutil
import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.step_costs import TextForward, written
from kernels.cpu.library import use_threads
from kernels.layers import Product, Weight
from kernels.ops import Ops
from service.assembly import Assembly, assemble
from service.bench.commands import Out
from service.bench.experiment import conclude, counted, prepare, rate_ratio, shown
from service.config import LoadedConfig, ServiceConfig

_ROWS = (1, 5, 17)
_ONE, _CONTROL = "one process", "one process again"


@dataclass
class _Way:
    """A way to compute forwards, and the seconds that they took."""

    name: str
    assembly: Assembly
    threads: int
    forward: Callable[[int], object]
    seconds: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in _ROWS})

    @staticmethod
    def of(name: str, config: ServiceConfig, threads: int, assembly: Assembly | None = None) -> "_Way":
        made = assembly or assemble(config)
        return _Way(name, made, threads, TextForward(made))

    def run(self, rows: int) -> None:
        use_threads(self.threads)
        start = time.perf_counter()
        self.forward(rows)
        self.seconds[rows].append(time.perf_counter() - start)


def run(
    loaded: LoadedConfig,
    rounds: Annotated[int, typer.Option(min=3, help="Forwards of each number of rows.")] = 30,
    processes: Annotated[str, typer.Option(metavar="N,...", help="Numbers of processes; empty: none.")] = "2",
    chain: Annotated[bool, typer.Option("--chain", help="Also sum in one chain instead of pieces.")] = False,
    shape: Annotated[str | None, typer.Option(help="Write and use random weights, as step-costs does.")] = None,
    out: Out = None,
) -> bool:
    """Measure forwards of one process with all threads, and of several that share the threads and the model."""
    given = loaded.config.model_copy(update={"budget_policy": "fixed", "drafter": "none", "memory": "off"})
    if shape is not None:
        path = written(shape, "q4_k_m", None, given.state_dir)
        given = given.model_copy(update={"model": str(path), "served_model_name": path.stem})
    threads, whole = given.num_threads, prepare(given, out)
    memory = [_memory(whole)]
    ways = [_Way.of(_ONE, given, threads, whole)]
    if chain:
        ways.append(_Way.of(_CONTROL, given, threads))
        with patch.object(Ops, "plan_row_product", _in_one_chain):
            ways.append(_Way.of("one chain", given, threads))
    for size in map(int, filter(None, processes.split(","))):
        each = max(1, threads // size)
        shared = given.model_copy(update={"tensor_parallel": size, "threads": each})
        ways.append(_Way.of(f"{size} processes", shared, each))
        memory.append(_memory(ways[-1].assembly))
    with counted(rounds, "rounds") as advance:
        for turn in range(-1, rounds):
            for rows in _ROWS:
                for way in random.sample(ways, len(ways)):
                    way.run(rows)
            if turn < 0:
                for way in ways:
                    way.seconds = {rows: [] for rows in _ROWS}  # what is warm first
            advance(1)
    found = [_row(ways[0], way, rows) for way in ways[1:] for rows in _ROWS]
    table = Table("way", "rows", "ms", "of one process", "speed over one process")
    for row in found:
        table.add_row(row["way"], str(row["rows"]), f"{row['ms']:.2f}", f"{row['one_ms']:.2f}", shown(row["speed"]))
    return conclude(whole, out, found, {"memory": memory}, table, *map(str, memory))


def _row(one: _Way, way: _Way, rows: int) -> dict[str, Any]:
    theirs, ours = one.seconds[rows], way.seconds[rows]
    speed = rate_ratio([(1, seconds) for seconds in ours], [(1, seconds) for seconds in theirs])
    middle = [1e3 * float(torch.tensor(values).median()) for values in (ours, theirs)]
    return {"way": way.name, "rows": rows, "ms": middle[0], "one_ms": middle[1], "speed": speed}


def _memory(assembly: Assembly) -> dict[str, float]:
    """What this process holds of the model, and what each of those that follow has taken at most, in MB."""
    count, children = assembly.target.peers.shard.size - 1, psutil.Process().children()
    followers = sorted((one for one in children if "follow" in one.cmdline()), key=psutil.Process.create_time)
    return {
        "processes": count + 1,
        "weights": assembly.loaded.read_bytes / 1e6,
        "kv_cache": assembly.target.pool.num_slots * assembly.loaded.kv_shape.bytes_per_slot / 1e6,
        **{
            f"peak_of_follower_{rank}": _peak(one.pid)
            for rank, one in enumerate(followers[-count:] if count else [], 1)
        },
    }


def _peak(pid: int) -> float:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 / 1e6


def _in_one_chain(ops: Ops, weight: Weight, bias: Tensor | None, unit: int) -> Product:
    return ops.plan_linear(weight, bias)
