"""`adaptree bench gpu`: tests first, then section by section until time is up, then aims, a table and the file."""

import gc
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from service.bench.conditions import CHECKOUT, conditions_of, refuse_unwritable, write_report
from service.bench.gpu_sections import (
    MEASURED,
    Figure,
    Plan,
    check_device,
    large_assembly,
    small_assembly,
    speed_figures,
    step_figures,
    widened_assembly,
)
from service.config import ServiceConfig

logger = logging.getLogger(__name__)

SECTIONS = ("tests", *MEASURED)
"""The most important first."""

KERNEL_TESTS = ("tests/kernels",)
ENGINE_TESTS = ("tests/drafters/test_readback.py", "tests/kernels/test_graph_runner.py", "tests/e2e/test_cuda.py")
"""Where tests marked gpu are; others ask for packages that need not be on a machine that measures."""


@dataclass(frozen=True, slots=True)
class Aim:
    what: str
    section: str
    name: str
    holds: Callable[[float], bool]
    of_large: bool = False  # judged by large models alone, whose weights are random


AIMS = (
    Aim("large plain decode at batch 1 is at 80 % of its floor", "decode", "share of floor", lambda v: v >= 0.8, True),
    Aim("host and glue take at most 10 % of a large step", "decode", "share outside kernels", lambda v: v <= 0.1, True),
    Aim("drafting takes at most 16 % of a large step", "drafter", "share of a step", lambda v: v <= 0.16, True),
    Aim("a step with 31 nodes takes at most 1.3 plain ones", "drafter", "over a plain step", lambda v: v <= 1.3, True),
    Aim("speculation is 1.5 times plain decode at T=0", "speed", "decode speedup at T=0", lambda v: v >= 1.5),
    Aim("speculation is 1.3 times plain decode at T=1", "speed", "decode speedup at T=1", lambda v: v >= 1.3),
    Aim("under load 0.97 of plain at least", "load", "adaptive over plain", lambda v: v >= 0.97),
    Aim("training beside costs at most 10 % of tokens/s", "training", "loss of tokens/s", lambda v: v <= 0.1),
    Aim("no token differs", "exactness", "mismatched tokens", lambda v: v == 0),
)


@dataclass(frozen=True, slots=True)
class Judged:
    what: str
    verdict: Literal["met", "missed", "not measured", "not judged"]
    value: float | None = None


def judge(figures: Sequence[Figure], *, for_real: bool) -> list[Judged]:
    """Every aim against its worst figure; a rehearsal is not judged, but for exactness."""
    judged = []
    for aim in AIMS:
        meant = [figure for figure in figures if (figure.section, figure.name) == (aim.section, aim.name)]
        values = [figure.value for figure in meant if figure.costs_only or not aim.of_large]
        failing = [value for value in values if not aim.holds(value)]
        if not values:
            judged.append(Judged(aim.what, "not measured"))
        elif not for_real and aim.section != "exactness":
            judged.append(Judged(aim.what, "not judged", (failing or values)[0]))
        else:
            judged.append(Judged(aim.what, "missed" if failing else "met", (failing or values)[0]))
    return judged


def run_gpu(config: ServiceConfig, sections: Sequence[str], plan: Plan, *, out: Path | None) -> bool:
    """Measure and report; whether the tests passed, no section failed and every token was the same."""
    refuse_unwritable(out)
    check_device(config, plan, torch.cuda.device_count())
    run = Findings(plan)
    tests_pass = "tests" not in sections or run.tests()
    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        assembly = small_assembly(config, plan, Path(folder))
        conditions = conditions_of(assembly)
        run.keep = lambda: write_report(out, conditions, run.figures, _summary(run, sections, plan))
        for name in filter(sections.__contains__, MEASURED):
            run.measure(name, partial(MEASURED[name], assembly, plan))
        del assembly
    if "steps" in sections:
        for name in plan.large:
            forget()
            run.measure(f"steps of {name}", partial(_large, config, plan, name))
    if "speed" in sections:
        for copies in plan.widened:
            forget()
            run.measure(f"speed of {copies} copies", partial(_widened, config, plan, copies))
    judged = judge(run.figures, for_real=plan.for_real)
    _show(run.figures, judged, plan)
    exact = all(aim.verdict != "missed" for aim in judged if aim.what == "no token differs")
    return tests_pass and exact and not run.failed


def _summary(run: "Findings", sections: Sequence[str], plan: Plan) -> dict[str, object]:
    return {
        "dry_run": not plan.for_real,
        "sections": [*sections],
        "tests": run.test_line,
        "skipped": run.skipped,
        "failed": run.failed,
        "aims": judge(run.figures, for_real=plan.for_real),
    }


def _large(config: ServiceConfig, plan: Plan, name: str) -> Iterator[Figure]:
    return step_figures(large_assembly(config, plan, name), plan)


def _widened(config: ServiceConfig, plan: Plan, copies: int) -> Iterator[Figure]:
    with TemporaryDirectory(prefix="adaptree-bench-") as folder:
        yield from speed_figures(widened_assembly(config, plan, copies, Path(folder)), plan)


class Findings:
    """Figures as they come in, what there was no time for, and what broke."""

    def __init__(self, plan: Plan) -> None:
        self.figures: list[Figure] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}  # why, by section
        self.test_line = "not run"
        self.keep: Callable[[], object] = lambda: None  # called after each section: the next one may be cut off
        self._plan = plan
        self._console = Console(stderr=True)
        self._start = time.monotonic()

    def tests(self) -> bool:
        """Run the tests that need a device; in a rehearsal only see that they can be found."""
        self._say("tests marked gpu")
        workers = ["-n", "auto"] if find_spec("xdist") else []  # kernels compile one by one
        kernels, kernels_said = _tested(KERNEL_TESTS, workers, self._plan.for_real)
        engine, engine_said = _tested(ENGINE_TESTS, [], self._plan.for_real)
        self.test_line = f"kernels: {kernels_said}; engine: {engine_said}"
        self._say(self.test_line)
        return kernels and engine

    def measure(self, name: str, section: Callable[[], Iterator[Figure]]) -> None:
        """Unless time is up. A section that breaks is told and reported; it must not cost the figures of the others."""
        if time.monotonic() - self._start > 60 * self._plan.minutes:
            self.skipped.append(name)
            self._say(f"no time left for {name}")
            return
        self._say(name)
        try:
            self.figures += list(section())
        except Exception as error:
            logger.exception("section %s failed", name)
            self.failed[name] = f"{type(error).__name__}: {error}"
            self._say(f"failed: {self.failed[name]}")
        self.keep()

    def _say(self, what: str) -> None:
        self._console.print(f"{time.monotonic() - self._start:6.1f} s  {what}", highlight=False, markup=False)


def _tested(paths: Sequence[str], options: Sequence[str], for_real: bool) -> tuple[bool, str]:
    """Run tests that need a device, without one only find them; whether they passed, and their last line."""
    how = [*options, "-p", "no:benchmark"] if for_real else ["--collect-only"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--no-header", *how, *paths]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        logger.error("%s", "\n".join(failed))
    lines = done.stdout.strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else done.stderr.strip()[-200:]


def forget() -> None:
    """Give a model's memory back before the next one comes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures_table(figures: Sequence[Figure]) -> Table:
    table = Table("section", "figure", "value", "unit", "at")
    for figure in figures:
        at = ", ".join(f"{name} {value}" for name, value in figure.at.items())
        costs_only = " (costs only)" if figure.costs_only else ""
        table.add_row(figure.section, figure.name, f"{figure.value:,.4g}", figure.unit, at + costs_only)
    return table


def _show(figures: Sequence[Figure], judged: Sequence[Judged], plan: Plan) -> None:
    aims = Table("aim", "", "value")
    for aim in judged:
        aims.add_row(aim.what, aim.verdict, "" if aim.value is None else f"{aim.value:.3g}")
    console = Console()
    console.print(figures_table(figures), aims)
    if not plan.for_real:
        console.print("a rehearsal on a CPU with tiny shapes: these figures say nothing of a GPU")
