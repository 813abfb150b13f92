"""`python -m benchmarks gpu`: run the tests for a GPU, then sections until time is up; judge, print, write."""

import gc
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_sections import DRY, FULL, MEASURED, Figure, FiguresOf, Plan, speed_figures, step_figures
from service.assembly import Assembly, assemble
from service.bench.commands import Out, PromptFile, names
from service.conditions import CHECKOUT, conditions_of, refuse_unwritable, write_report
from service.config import LoadedConfig, ServiceConfig
from service.errors import StartupError

logger = logging.getLogger(__name__)

SECTIONS = ("tests", *MEASURED)
"""The most important first."""

KERNEL_TESTS = ("tests/kernels",)
ENGINE_TESTS = ("tests/drafters/test_readback.py", "tests/kernels/test_graph_runner.py", "tests/e2e/test_cuda.py")
"""All files with tests marked gpu; other tests need packages that a measuring machine may lack."""

_LARGE = {
    **{"max_sequences": 8, "kv_cache": "8GiB"},
    **{"drafter": "specblock", "draft_blocks": 2, "budget_policy": "fixed"},
}
_REHEARSAL = {
    **{"threads": 1, "device": "cpu", "max_sequences": 2, "kv_cache": "100MiB", "max_model_len": 512},
    **{"max_budget": 8, "budget_policy": "fixed"},
}


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that a figure should keep."""

    what: str
    section: str
    name: str
    holds: Callable[[float], bool]
    of_large: bool = False  # judged on large models with random weights only


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
    """The verdict on one aim."""

    what: str
    verdict: Literal["met", "missed", "not measured", "not judged"]
    value: float | None = None


def judge(figures: Sequence[Figure], *, for_real: bool) -> list[Judged]:
    """Judge every aim by its worst figure; of a rehearsal only exactness."""
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


def check_device(config: ServiceConfig, plan: Plan, cuda_devices: int) -> None:
    """Raise StartupError where the plan needs a GPU and there is none."""
    if plan.for_real and (cuda_devices == 0 or config.device == "cpu"):
        raise StartupError("this measures a GPU, and there is none: add --dry-run to try every part on a CPU")


def assembled(config: ServiceConfig, plan: Plan, model: Path | None = None, **values: object) -> Assembly:
    """Load the configured model, or a checkpoint with the drafter in its subfolder `drafter`, with other settings."""
    changed: dict[str, object] = {**config.model_dump(), **values}
    if model is not None:
        drafter = model / "drafter"
        changed |= {
            "model": str(next(model.glob("*.gguf"), model).absolute()),
            "drafter_path": drafter if drafter.is_dir() else None,
        }
    if not plan.for_real:
        changed |= _REHEARSAL
    return assemble(ServiceConfig.model_validate(changed), graphs=True)


def run(
    loaded: LoadedConfig,
    sections: Annotated[
        str, typer.Option(metavar="NAME,...", help="Some of tests,exactness,steps,speed,load,training. Unset: all.")
    ] = "",
    prompts: PromptFile = None,
    answers: Annotated[int, typer.Option(min=1, help="Prompts answered in each measurement of speed.")] = 16,
    large: Annotated[
        str, typer.Option(metavar="FOLDER,...", help="Checkpoints with random weights, for steps: costs only.")
    ] = "",
    deepened: Annotated[
        str, typer.Option(metavar="FOLDER,...", help="Checkpoints of deepened models, for speed.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try every part on a CPU; the figures are not those of a GPU.")
    ] = False,
    out: Out = None,
) -> bool:
    """Test and measure this GPU, section by section. `python -m benchmarks checkpoint` writes checkpoints for --large
    and --deepened. Exit code 1 if anything fails or a token differs."""
    asked = names(sections) or SECTIONS
    unknown = [name for name in asked if name not in SECTIONS]
    if unknown:
        raise StartupError(f"--sections {', '.join(unknown)}: give some of {', '.join(SECTIONS)}")
    plan = DRY if dry_run else replace(FULL, answers=answers)
    plan = replace(plan, large=tuple(map(Path, names(large))), deepened=tuple(map(Path, names(deepened))))
    return _run(loaded.config, asked, replace(plan, prompts=prompts), out)


def _run(config: ServiceConfig, sections: Sequence[str], plan: Plan, out: Path | None) -> bool:
    """Measure and report; return whether tests passed, no section failed and no token differed."""
    refuse_unwritable(out)
    check_device(config, plan, torch.cuda.device_count())
    findings = Findings(plan)
    tests_pass = "tests" not in sections or findings.tests()
    assembly = assembled(config, plan, kv_cache="8GiB", max_sequences=max(plan.concurrencies))
    conditions = conditions_of(assembly)
    findings.keep = lambda: write_report(out, conditions, findings.figures, findings.summary(sections))
    for name in filter(sections.__contains__, MEASURED):
        findings.measure(name, partial(MEASURED[name], assembly, plan))
    del assembly

    def measured(figures: FiguresOf, folder: Path, sizes: Mapping[str, object]) -> Iterator[Figure]:
        return figures(assembled(config, plan, folder, **sizes), plan)

    for folder in plan.large if "steps" in sections else ():
        forget()
        sizes = {**_LARGE, "max_model_len": max(plan.contexts) + 512}
        costs = partial(step_figures, costs_only=True)
        findings.measure(f"steps of {folder.name}", partial(measured, costs, folder, sizes))
    for folder in plan.deepened if "speed" in sections else ():
        forget()
        sizes = {"kv_cache": "16GiB", "max_sequences": 8}
        findings.measure(f"speed of {folder.name}", partial(measured, speed_figures, folder, sizes))
    judged = judge(findings.figures, for_real=plan.for_real)
    _show(findings.figures, judged, plan)
    exact = all(aim.verdict != "missed" for aim in judged if aim.what == "no token differs")
    return tests_pass and exact and not findings.failed


class Findings:
    """Collects figures, skipped sections and failures."""

    def __init__(self, plan: Plan) -> None:
        self.figures: list[Figure] = []
        self.skipped: list[str] = []
        self.failed: dict[str, str] = {}  # reason by section
        self.test_line = "not run"
        self.keep: Callable[[], object] = lambda: None  # called after each section, as the run may be cut off
        self._plan = plan
        self._console = Console(stderr=True)
        self._start = time.monotonic()

    def tests(self) -> bool:
        """Run the tests that need a device, or in a rehearsal collect them; return whether all passed."""
        self._say("tests marked gpu")
        workers = ["-n", "auto"] if find_spec("xdist") else []  # kernels compile one by one
        kernels_pass, kernels = _tested(KERNEL_TESTS, workers, self._plan.for_real)
        engine_pass, engine = _tested(ENGINE_TESTS, [], self._plan.for_real)
        self.test_line = f"kernels: {kernels}; engine: {engine}"
        self._say(self.test_line)
        return kernels_pass and engine_pass

    def measure(self, name: str, section: Callable[[], Iterator[Figure]]) -> None:
        """Measure a section unless time is up. A section that fails is reported and does not end the run."""
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

    def summary(self, sections: Sequence[str]) -> dict[str, object]:
        """Return what the report says of the whole run."""
        return {
            "dry_run": not self._plan.for_real,
            "sections": [*sections],
            "tests": self.test_line,
            "skipped": self.skipped,
            "failed": self.failed,
            "aims": judge(self.figures, for_real=self._plan.for_real),
        }

    def _say(self, what: str) -> None:
        self._console.print(f"{time.monotonic() - self._start:6.1f} s  {what}", highlight=False, markup=False)


def _tested(paths: Sequence[str], options: Sequence[str], for_real: bool) -> tuple[bool, str]:
    """Run or only collect the tests marked gpu; return whether they passed, and pytest's last line."""
    how = [*options, "-p", "no:benchmark"] if for_real else ["--collect-only"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--no-header", *how, *paths]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        logger.error("%s", "\n".join(failed))
    lines = done.stdout.strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else done.stderr.strip()[-200:]


def forget() -> None:
    """Free the memory of a model that is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures_table(figures: Sequence[Figure]) -> Table:
    """Return a table with one line per figure."""
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
        console.print("a rehearsal on a CPU: these figures are not those of a GPU")
