"""The policies that `adaptree bench load` compares, by the names they are given on the command line.

plain                     no drafting
fixed:N                   N nodes per sequence and step
per_batch_size[:B=N/...]  N nodes from B sequences on, by a table written by hand
adaptive                  the configured budget by cost
"""

from collections.abc import Mapping

from drafters.registry import NoDrafter
from drafters.tree import MAX_NODES
from service.assembly import Assembly
from service.bench.load_rows import ADAPTIVE, FIXED, PLAIN
from service.engine.budget import BudgetPolicy, FixedBudget
from service.engine.build import EngineLimits
from service.engine.engine import Engine
from service.errors import StartupError

PER_BATCH_SIZE = "per_batch_size"
_DEFAULT_TABLE = {1: 32, 2: 16, 4: 8, 8: 4, 16: 0}


def policy_names(text: str) -> list[str]:
    """Names from a list with commas. Raises StartupError for an unknown one."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise StartupError("--policies names nobody: give for example plain,fixed:16,adaptive")
    for name in names:
        if name not in (PLAIN, ADAPTIVE):
            static_budget(name)
    return names


def static_budget(name: str) -> BudgetPolicy:
    """The static policy of that name. Raises StartupError."""
    kind, _, rest = name.partition(":")
    if name.startswith(FIXED) and rest.isdigit() and int(rest) <= MAX_NODES:
        return FixedBudget(int(rest))
    if kind == PER_BATCH_SIZE:
        return FixedBudget(_table(rest) if rest else _DEFAULT_TABLE)
    raise StartupError(
        f"--policies: {name!r} is none of plain, adaptive, fixed:N (N up to {MAX_NODES}), "
        "per_batch_size and per_batch_size:1=32/4=8/16=0"
    )


def engine_for(assembly: Assembly, name: str, limits: EngineLimits) -> Engine:
    """An engine of its own on the shared target. Raises StartupError where nothing was measured."""
    if name == PLAIN:
        return assembly.engine(drafter=NoDrafter(), policy=FixedBudget(0), limits=limits)
    if name != ADAPTIVE:
        return assembly.engine(policy=static_budget(name), limits=limits)
    if assembly.costs is None:
        raise StartupError("the adaptive policy needs measured costs: set budget_policy to cost")
    return assembly.engine(limits=limits)


def _table(text: str) -> Mapping[int, int]:
    try:
        table = {int(batch): int(nodes) for batch, nodes in (entry.split("=") for entry in text.split("/"))}
    except ValueError:
        raise StartupError(f"--policies: {text!r} is no table such as 1=32/4=8/16=0") from None
    if 1 not in table or not all(0 <= nodes <= MAX_NODES for nodes in table.values()):
        raise StartupError(f"--policies: the table {text!r} must name 1, and at most {MAX_NODES} nodes")
    return table
