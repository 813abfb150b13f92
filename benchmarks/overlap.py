"""`python -m benchmarks overlap`: how much of the host's time passes while a device computes.

The engine runs on a made-up device: launching a forward takes no time, and what the host reads is there when all
forwards launched before have taken the seconds that the device is given. Everything else is real, and is the host's
work: schedule, layout, memory drafts, emitting text, books. What a GPU would be asked for besides the forward is
computed on the host, and counts as the host's. Each device runs with steps one after the other, and launched ahead.

    hidden = (step one after the other - step ahead) / min(host, device),  host = step one after the other - device

Of two that can overlap the shorter one can be hidden at most.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.checkpoint import write_dummy
from benchmarks.decision_worlds import read_prices
from drafters.readback import Arriving, arriving
from kernels.rows import ForwardRows
from service.assembly import Assembly, assemble
from service.bench.commands import Out, numbers
from service.bench.experiment import Column, Row, counted, report, table_of
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig, ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.kv_pool import SlotTable
from service.engine.requests import GenerationRequest, SamplingParams, Submission
from service.engine.target import Target, TargetOutput

_CONTEXT, _PROMPT, _PERIOD, _LENGTH = 256, 8, 48, 2048
_SPIN_SECONDS = 2e-4
"""Rest of a wait in which the host does not sleep, as sleep is that late."""


class SimulatedDevice:
    """Takes the same seconds for each forward, one after the other."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.forwards, self.waits = seconds, 0, 0
        self._free_at = 0.0

    def launch(self) -> None:
        """Begin a forward once those before have ended; returns at once."""
        self._free_at = max(time.perf_counter(), self._free_at) + self.seconds
        self.forwards += 1

    def arriving(self, values: Tensor) -> Arriving:
        """Send values that are there when all forwards launched so far have ended."""
        there, sent = self._free_at, arriving(values)

        def arrived() -> Tensor:
            self.waits += 1
            time.sleep(max(0.0, there - time.perf_counter() - _SPIN_SECONDS))
            while time.perf_counter() < there:
                pass
            return sent()

        return arrived


class SimulatedTarget(Target):
    """A target whose tokens repeat after `_PERIOD`, so that memory drafts are right; its forwards are the device's."""

    def __init__(self, target: Target, device: SimulatedDevice) -> None:
        self.__dict__.update(target.__dict__)
        self.simulated = device

    def forward(
        self, rows: ForwardRows, table: SlotTable, scored: Tensor | None = None, *, features: bool = True
    ) -> TargetOutput:
        """As the base class."""
        self.simulated.launch()
        logits = torch.zeros(len(rows.logit_rows), self.vocab_size)
        following = (rows.tokens[rows.logit_rows] + 1) % _PERIOD
        return TargetOutput(logits.scatter_(1, following[:, None], 1.0), None)

    def arriving(self, values: Tensor, *, at_once: bool) -> Arriving:
        """As the base class."""
        return self.simulated.arriving(values)


class Operations(TorchDispatchMode):
    """Counts operations on tensors that are no views: what a device would be asked for one by one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += all(result.alias_info is None or result.alias_info.is_write for result in func._schema.returns)
        return func(*args, **(kwargs or {}))


def engine_of(assembly: Assembly, device: SimulatedDevice, nodes: int, steps_ahead: int) -> Engine:
    """Build an engine on a made-up device, with so many nodes from the memory in each tree."""
    target = SimulatedTarget(assembly.target, device)
    limits = replace(assembly.limits, steps_ahead=steps_ahead)
    drafter = assembly.drafter("memory" if nodes else "none", limits)
    return replace(assembly, target=target).engine(drafter, FixedBudget(nodes), limits)


def decode(engine: Engine, num_sequences: int, steps: int, seen: Operations | None = None) -> float:
    """Decode texts together, and return the seconds of a step in their middle; `seen` counts the operations there."""
    params = SamplingParams(seed=0, max_tokens=_LENGTH - _PROMPT, temperature=0.0, ignore_eos=True)
    prompt = tuple(range(_PROMPT))
    texts = [GenerationRequest(request_id=str(n), prompt=prompt, sampling=params) for n in range(num_sequences)]
    engine.submit(Submission(texts))
    while engine.load.num_waiting or min(one.num_generated for one in engine.scheduler.running) < 2 * _PERIOD:
        engine.step()
    with seen or nullcontext():
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = (time.perf_counter() - begun) / steps
    engine.abort(*(text.request_id for text in texts))
    while not engine.idle:
        engine.step()
    return seconds


def measured(assembly: Assembly, place: tuple[str, float, int, int], steps: int, turns: int) -> Row:
    """Measure a device, given by name and seconds, with so many texts and nodes, by turns. Figures are medians."""
    name, seconds, num_sequences, nodes = place
    devices = [SimulatedDevice(seconds) for _ in range(2)]
    engines = {ahead: engine_of(assembly, device, nodes, ahead) for ahead, device in enumerate(devices)}
    walls: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(turns):
        for ahead in (0, 1) if turn % 2 else (1, 0):
            walls[ahead].append(decode(engines[ahead], num_sequences, steps))
    shares = [(off - on) / min(off - seconds, seconds) for off, on in zip(walls[0], walls[1], strict=True)]
    operations = []
    for engine in engines.values():
        decode(engine, num_sequences, steps, seen := Operations())
        operations.append(seen.count / steps)
    return {
        "device": name,
        "device_ms": 1e3 * seconds,
        "sequences": num_sequences,
        "nodes": nodes,
        "step_ms": 1e3 * median(walls[0]),
        "ahead_ms": 1e3 * median(walls[1]),
        "host_ms": 1e3 * (median(walls[0]) - seconds),
        "hidden": {"value": median(shares), "low": min(shares), "high": max(shares)},
        "operations": operations[0],
        "operations_ahead": operations[1],
        "waits": devices[1].waits / devices[1].forwards,
    }


def run(
    loaded: LoadedConfig,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Reports of prices.", exists=True)],
    sequences: Annotated[str, typer.Option(metavar="N,...", help="Texts at a time.")] = "1,64",
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Nodes of each tree besides none.")] = "7",
    short_ms: Annotated[str, typer.Option(metavar="N,...", help="Forwards of further devices.")] = "1,2",
    steps: Annotated[int, typer.Option(min=8, help="Steps of each turn.")] = 100,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each device.")] = 7,
    out: Out = None,
) -> bool:
    """Measure how much of the host's time passes while a made-up device computes, by its seconds for a forward."""
    refuse_unwritable(out)
    batches = numbers(sequences, "--sequences")
    machines = [one for file in files for one in read_prices(file, eager=False) if one.captured]
    devices = [
        (machine.name, float(machine.verify.verify_seconds(np.array([batch]), _CONTEXT, batch)[0]), batch)
        for machine, batch in product(machines, batches)
    ]
    devices += [(f"{ms} ms", ms / 1e3, batch) for ms, batch in product(numbers(short_ms, "--short-ms"), batches)]
    places = [(*device, count) for device, count in product(devices, (0, *numbers(nodes, "--nodes")))]
    rows = list[Row]()
    with TemporaryDirectory() as folder, counted(len(places), "rows") as advance:
        model = write_dummy("tiny", Path(folder) / "tiny")
        sizes = {"max_model_len": _LENGTH, "max_sequences": max(batches), "kv_cache": "2GiB", "drafter": "none"}
        fixed = {"model": str(model), "device": "cpu", "state_dir": folder, "max_budget": 16, "budget_policy": "fixed"}
        assembly = assemble(ServiceConfig.model_validate({**sizes, **fixed}))
        for place in places:
            rows.append(measured(assembly, place, steps, turns))
            advance(1)
    summary = {"least_hidden": min(row["hidden"]["value"] for row in rows)}
    return report(surroundings(), out, rows, summary, table_of(_COLUMNS, rows, section=lambda row: row["device"]))


_COLUMNS: tuple[Column, ...] = (
    ("device", lambda row: row["device"]),
    ("forward, ms", lambda row: f"{row['device_ms']:.2f}"),
    ("texts", lambda row: str(row["sequences"])),
    ("nodes", lambda row: str(row["nodes"])),
    ("host, ms", lambda row: f"{row['host_ms']:.2f}"),
    ("step, ms", lambda row: f"{row['step_ms']:.2f}"),
    ("ahead", lambda row: f"{row['ahead_ms']:.2f}"),
    ("hidden", lambda row: "{value:.2f} [{low:.2f}, {high:.2f}]".format(**row["hidden"])),
    ("operations", lambda row: f"{row['operations']:.0f}"),
    ("ahead", lambda row: f"{row['operations_ahead']:.0f}"),
    ("waits", lambda row: f"{row['waits']:.2f}"),
)
