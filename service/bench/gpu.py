"""`adaptree bench gpu`: tests first, then section by section until time is up, then aims, a table and the file."""

import gc
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from service.bench.conditions import Conditions, conditions_of, refuse_unwritable, write_report
from service.bench.gpu_sections import (
    DRY,
    FULL,
    Figure,
    Plan,
    check_device,
    exactness_figures,
    large_assembly,
    load_figures,
    small_assembly,
    speed_figures,
    step_figures,
    training_figures,
)
from service.config import ServiceConfig
from service.errors import StartupError

logger = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).resolve().parents[2]

KERNEL_TESTS = ("tests/kernels",)
ENGINE_TESTS = ("tests/drafters/test_readback.py", "tests/kernels/test_graph_runner.py", "tests/e2e/test_cuda.py")
"""Where tests marked gpu are; others ask for packages that need not be on a machine that measures."""

Verdict = Literal["met", "missed", "not measured", "not judged"]

_Sections = dict[str, Callable[[], Iterator[Figure]]]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a figure shall be."""

    what: str
    section: str
    name: str
    holds: Callable[[float], bool]
    of_large: bool = False  # judged by large models alone, whose weights are random


AIMS = (
    Aim("large plain decode at batch 1 is at 80 % of its floor", "decode", "share of floor", lambda v: v >= 0.8, True),
    Aim("host and glue take at most 10 % of a large step", "decode", "share outside kernels", lambda v: v <= 0.1, True),
    Aim("drafting takes at most 16 % of a large step", "drafter", "share of a step", lambda v: v <= 0.16, True),
    Aim("speculation is 2.5 times plain decode", "speed", "decode speedup at T=0", lambda v: v >= 2.5),
    Aim("training beside costs at most 10 % of tokens/s", "training", "loss of tokens/s", lambda v: v <= 0.1),
    Aim("no token differs", "exactness", "mismatched tokens", lambda v: v == 0),
)


@dataclass(frozen=True, slots=True)
class Judged:
    """An aim and what became of it."""

    what: str
    verdict: Verdict
    value: float | None


def judge(figures: Sequence[Figure], *, for_real: bool) -> list[Judged]:
    """Every aim against its worst figure; a rehearsal is not judged, but for exactness."""
    return [_judged(aim, [figure.value for figure in figures if _concerns(aim, figure)], for_real) for aim in AIMS]


def _concerns(aim: Aim, figure: Figure) -> bool:
    is_meant = (figure.section, figure.name) == (aim.section, aim.name)
    return is_meant and (figure.costs_only or not aim.of_large)


def _judged(aim: Aim, values: Sequence[float], for_real: bool) -> Judged:
    if not values:
        return Judged(aim.what, "not measured", None)
    failing = [value for value in values if not aim.holds(value)]
    value = failing[0] if failing else values[0]
    if not for_real and aim.section != "exactness":
        return Judged(aim.what, "not judged", value)
    return Judged(aim.what, "missed" if failing else "met", value)


def run_gpu(config: ServiceConfig, *, dry_run: bool, with_tests: bool, out: Path | None) -> bool:
    """Measure and report; whether the tests passed, no section failed and every token was the same."""
    refuse_unwritable(out)
    plan, run = (DRY if dry_run else FULL), Findings()
    check_device(config, plan, torch.cuda.device_count())
    tests_pass = not with_tests or run.tests(for_real=plan.for_real)
    first, *others = plan.large
    run.large(config, plan, first)
    forget()
    conditions = run.small(config, plan)
    for name in others:
        forget()
        run.large(config, plan, name)
    judged = judge(run.figures, for_real=plan.for_real)
    _show(run.figures, judged, plan)
    summary = {
        "dry_run": dry_run,
        "tests": run.test_line,
        "skipped": run.skipped,
        "failed": run.failed,
        "aims": [asdict(aim) for aim in judged],
    }
    write_report(out, conditions, [figure.as_json() for figure in run.figures], summary)
    exact = all(aim.verdict != "missed" for aim in judged if aim.what == "no token differs")
    return tests_pass and exact and not run.failed


class Findings:
    """Figures as they come in, what there was no time for, and what broke."""

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}  # why, by section
        self.test_line = "not run"
        self._console = Console(stderr=True)
        self._start = time.monotonic()

    def tests(self, *, for_real: bool) -> bool:
        """Run the tests that need a device; in a rehearsal only see that they can be found."""
        self._say("tests marked gpu")
        workers = ["-n", "auto"] if find_spec("xdist") else []  # kernels compile one by one
        kernels, engine = _tested(KERNEL_TESTS, workers, for_real), _tested(ENGINE_TESTS, [], for_real)
        self.test_line = f"kernels: {kernels.said}; engine: {engine.said}"
        self._say(self.test_line)
        return kernels.passed and engine.passed

    def large(self, config: ServiceConfig, plan: Plan, name: str) -> None:
        if self._late(f"steps of {name}", plan):
            return
        try:
            assembly = large_assembly(config, plan, name)
        except StartupError as error:
            return self._broke(name, error)
        self._collect(plan, {f"steps of {name}": lambda: step_figures(assembly, plan)})

    def small(self, config: ServiceConfig, plan: Plan) -> Conditions:
        """Measure the served model; returns what it ran on."""
        with TemporaryDirectory(prefix="adaptree-bench-") as folder:
            assembly = small_assembly(config, plan, Path(folder))
            self._collect(
                plan,
                {
                    "speed": lambda: speed_figures(assembly, plan),
                    f"steps of {assembly.config.model}": lambda: step_figures(assembly, plan),
                    "training": lambda: training_figures(assembly, plan),
                    "exactness": lambda: exactness_figures(assembly, plan),
                    "load": lambda: load_figures(assembly, plan),
                },
            )
            return conditions_of(assembly)

    def _collect(self, plan: Plan, sections: _Sections) -> None:
        for name, section in sections.items():
            if not self._late(name, plan):
                self._say(name)
                self.measure(name, section)

    def measure(self, name: str, section: Callable[[], Iterator[Figure]]) -> None:
        """A section that breaks is told and reported; it must not cost the figures of the others."""
        try:
            self.figures += list(section())
        except Exception as error:
            logger.exception("section %s failed", name)
            self._broke(name, error)

    def _broke(self, name: str, error: Exception) -> None:
        self.failed[name] = f"{type(error).__name__}: {error}"
        self._say(f"failed: {self.failed[name]}")

    def _late(self, name: str, plan: Plan) -> bool:
        late = time.monotonic() - self._start > 60 * plan.minutes
        if late:
            self.skipped.append(name)
            self._say(f"no time left for {name}")
        return late

    def _say(self, what: str) -> None:
        self._console.print(f"{time.monotonic() - self._start:6.1f} s  {what}", highlight=False, markup=False)


class _Tested(NamedTuple):
    passed: bool
    said: str  # the last line


def _tested(paths: Sequence[str], options: Sequence[str], for_real: bool) -> _Tested:
    """Run tests that need a device, away from plugins that refuse workers; without one see that they can be found."""
    how = [*options, "-p", "no:benchmark"] if for_real else ["--collect-only"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--no-header", *how, *paths]
    done = subprocess.run(command, cwd=_CHECKOUT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        logger.error("%s", "\n".join(failed))
    lines = done.stdout.strip().splitlines()
    return _Tested(done.returncode == 0, lines[-1] if lines else done.stderr.strip()[-200:])


def forget() -> None:
    """Give a model's memory back before the next one comes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures_table(figures: Sequence[Figure]) -> Table:
    """One line per figure."""
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
