"""How often a captured step of the engine asks a device for something, and waits for it: the figures of docs/gpu.md."""

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoint import DRAFTER, write_dummy
from drafters.asking import AskGate
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from tests.service.engine.harness import greedy, request
from tests.service.engine.host_reads import HostReads
from tests.service.engine.launches import Launches
from tests.service.engine.test_host_reads import ON_THE_HOST, TOKENS

torch.set_num_threads(1)

LAUNCHES = {
    "none": (5, 3),
    "memory": (13, 8),
    "switch(memory,random)": (27, 8),
    "specblock": (18, 10),
    "memory+specblock": (25, 13),
}
"""By drafter, outside of graphs, and graphs replayed; the default one is the last. The memory alone is right here to
the last node: otherwise slots are freed by one more."""


def captured(folder: Path, drafter: str) -> Assembly:
    model = write_dummy("tiny", folder / "tiny")
    settings = {"model": str(model), "drafter_path": model / DRAFTER, "load_dtype": "float32", "device": "cpu"}
    sizes = {"max_model_len": 256, "max_sequences": 1, "kv_cache": "10MiB", "max_budget": 16, "draft_blocks": 2}
    more = {"drafter": drafter, "budget_policy": "fixed", "threads": 1, "state_dir": folder}
    return assemble(ServiceConfig.model_validate({**settings, **sizes, **more}), graphs=True)


def step_in_the_middle(engine: Engine, launches: Launches) -> tuple[list[str], int]:
    """One step of a text, counted. # -> its reads, number of uploads"""
    engine.add(request("0", [5, 6, 7, 8] * 10, greedy(210)))
    for _ in range(9):  # by then shapes are settled: what stands behind a text in one is filled up once
        engine.step()
    launches.count = launches.replays = 0
    with HostReads() as reads, launches:
        stats = engine.step().stats
    assert stats is not None
    assert not stats.prompt_tokens
    seen, uploads = (
        [wait for wait in waits if not wait.startswith(ON_THE_HOST)] for waits in (reads.seen, reads.uploads)
    )
    return seen, len(uploads)


def always(gate: AskGate, expected: float, *, can_answer: bool = True) -> bool:
    """Asks, whatever that has gained."""
    gate._step.situation = 0, False
    gate._step.asked.append((gate._gains.of(1, gate._step.situation), expected))
    return True


@pytest.mark.parametrize("drafter", LAUNCHES)
def test_what_a_step_asks_for(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one text, with all that a drafter may be asked for."""
    launches = Launches()
    launches.stand_for_a_device(monkeypatch)
    monkeypatch.setattr(AskGate, "ask", always)
    engine = captured(tmp_path, drafter).engine(policy=FixedBudget(0) if drafter == "none" else None)
    assert step_in_the_middle(engine, launches) == ([TOKENS], 0)
    assert (launches.count, launches.replays) == LAUNCHES[drafter]
