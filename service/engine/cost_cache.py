"""Measured costs on disk, so that only the first start on a machine has to measure them.

One file per machine, model, threads and version. A file that is not exactly what was asked for is refused and
measured again; a broken one is never half believed, because files are written beside their place and then renamed.
"""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from service.engine import instructions
from service.engine.cost import CostTable
from service.engine.draft_cost import DraftCosts

logger = logging.getLogger(__name__)

_CPU_INFO = Path("/proc/cpuinfo")
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """Everything that measured seconds depend on."""

    machine: str
    device: str
    model: str  # fingerprint of the weights, and their type in memory
    drafter: str
    threads: int
    rows: str  # how rows are padded
    sizes: str  # sequences, lengths and nodes that were measured
    version: str
    format: int = _FORMAT

    @property
    def file_name(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return f"costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured at start-up."""

    verify: CostTable
    drafts: DraftCosts


def cached_or_measured(
    folder: Path, key: CostKey, measure: Callable[[], Costs], is_out_of_date: Callable[[Costs], bool] = lambda _: False
) -> Costs:
    """The costs of this key from the folder, or else measured now and kept there."""
    file = folder / key.file_name
    costs = read(file, key)
    if costs is not None and is_out_of_date(costs):
        logger.warning("steps are faster than the costs in %s say: measuring again", file)
        costs = None
    if costs is None:
        costs = measure()
        write(file, key, costs)
    return costs


def read(file: Path, key: CostKey) -> Costs | None:
    """What the file holds, None (with one line in the log) if it is not a whole file of this very key."""
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        if content["key"] != asdict(key):
            logger.warning("costs in %s belong to something else: measuring again", file)
            return None
        return Costs(_table_from(content["verify"]), _drafts_from(content["drafts"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("costs in %s cannot be read (%s): measuring again", file, error)
        return None


def write(file: Path, key: CostKey, costs: Costs) -> None:
    """Put the costs there, all or nothing. A folder that cannot be written costs the next start a few seconds."""
    content = {"key": asdict(key), "verify": _lists(costs.verify), "drafts": _lists(costs.drafts)}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w") as handle:
            json.dump(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(file)
    except OSError as error:
        logger.warning("measured costs cannot be kept in %s: %s", file.parent, error)


def this_machine() -> str:
    """Processor, the instructions its products may use, and number of cores."""
    name = platform.processor() or platform.machine()
    if _CPU_INFO.is_file():
        models = (line.partition(":")[2].strip() for line in _CPU_INFO.read_text().splitlines() if "model name" in line)
        name = next(models, name)
    return f"{name} {instructions.chosen()} x {os.cpu_count()}"


def _lists(table: CostTable | DraftCosts) -> dict[str, Any]:
    return {name: values.tolist() for name, values in asdict(table).items()}  # planned transfer: numpy, on the host


def _table_from(content: dict[str, Any]) -> CostTable:
    table = CostTable(**{name: _numbers(content[name]) for name in ("sequences", "contexts", "rows", "seconds")})
    if table.seconds.shape != (table.sequences.size, table.contexts.size, table.rows.size):
        raise ValueError(f"a table of {table.seconds.shape} numbers does not fit its axes")
    return table


def _drafts_from(content: dict[str, Any]) -> DraftCosts:
    drafts = DraftCosts(**{name: _numbers(content[name]) for name in ("blocks", "batches", "seconds")})
    if drafts.seconds.shape != (drafts.blocks.size, drafts.batches.size):
        raise ValueError(f"a table of {drafts.seconds.shape} numbers does not fit its axes")
    return drafts


def _numbers(values: object) -> np.ndarray[Any, np.dtype[np.float64]]:
    numbers = np.asarray(values, dtype=np.float64)
    if not numbers.size or not np.isfinite(numbers).all():
        raise ValueError("numbers are missing")
    return numbers
