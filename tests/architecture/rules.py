"""The rules of the house as functions from source text to complaints, so that each can be shown to be able to fail.

They read syntax trees only: nothing of the project is imported.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("service", "adaptation", "drafters", "kernels")
BENCHMARKS = "benchmarks"  # outside of what is installed
PLANNED_TRANSFER = "# planned transfer"


def modules(*folders: str) -> list[Path]:
    """Every Python file below these folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def complaints(paths: Iterable[Path], rule: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What a rule finds in the source of these modules, by module; modules that keep the rule are left out."""
    found = {module_name(path): rule(path.read_text()) for path in paths}
    return {name: findings for name, findings in found.items() if findings}


parsed = cache(ast.parse)  # the same source is read by several rules


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported, at any depth, also by importlib with a literal name."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in {"import_module", "__import__"}:
            yield from ((node.lineno, ast.literal_eval(arg)) for arg in node.args[:1] if _is_text(arg))


def imports_of(source: str, packages: Sequence[str]) -> list[str]:
    """Imports of any of these packages, however they are spelt."""
    found = imported_names(source)
    return [f"line {line}: {name}" for line, name in found if any(is_below(name, package) for package in packages)]


def imports_upwards(source: str, module: str, allowed: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports of our own packages that the layer of `module` does not allow; relative ones are never allowed."""
    layer = max((name for name in allowed if is_below(module, name)), key=len, default=None)
    if layer is None:
        return [f"{module} stands in no layer"]
    return [
        f"line {line}: {name}"
        for line, name in imported_names(source)
        if name.startswith(".")
        or (name.split(".")[0] in PACKAGES and not any(is_below(name, package) for package in allowed[layer]))
    ]


def environment_reads(source: str) -> list[str]:
    """Uses of os.environ and its kin, under any alias."""
    homes = {"environ", "environb", "getenv", "putenv"}
    attributes = [
        (node.lineno, node.attr)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Attribute) and node.attr in homes
    ]
    names = [(line, name) for line, name in imported_names(source) if name in {f"os.{home}" for home in homes}]
    return [f"line {line}: {name}" for line, name in attributes + names]


def device_transfers(source: str) -> list[str]:
    """Calls that wait for the device, unless a line of the call carries the planned-transfer comment."""
    lines = source.splitlines()
    return [
        f"line {node.lineno}: {_called_name(node)}()"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call)
        and (_is_method_of(node, {"item", "tolist", "cpu", "synchronize"}) or _is_number_of_a_reduction(node))
        and not any(PLANNED_TRANSFER in line for line in lines[node.lineno - 1 : node.end_lineno])
    ]


def _is_method_of(node: ast.expr, names: Set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def _is_number_of_a_reduction(node: ast.Call) -> bool:
    """Such as int(ends.max()): what else is turned into a number, syntax cannot tell."""
    reductions = {"all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum"}
    is_number = isinstance(node.func, ast.Name) and node.func.id in {"bool", "float", "int"}
    return is_number and any(_is_method_of(argument, reductions) for argument in node.args)


def long_functions(source: str, ceiling: int) -> list[str]:
    functions = [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [f"{name} has {length} lines" for name, length in functions if length > ceiling]


def has_docstring(source: str) -> bool:
    return ast.get_docstring(parsed(source)) is not None


def statements_beside_version(source: str) -> list[str]:
    """What a module holds other than its docstring and a literal `__version__`."""
    first, *rest = ast.parse(source).body or [ast.Pass()]
    extra = [] if isinstance(first, ast.Expr) and _is_text(first.value) else [first]
    return [ast.unparse(node) for node in (*extra, *rest) if not ast.unparse(node).startswith("__version__ = '")]


# Character classes keep these patterns from matching themselves.
_FOREIGN = re.compile(
    r"(?<![\w.])/(?:[h]ome|[r]oot|[U]sers|[w]ork|[m]nt|[t]mp)/\w[\w./-]*"  # a path of somebody's machine
    r"|\b(?:sub-?[a]gents?|co[w]orkers?|[w]orkplace|[c]hatbot that wrote|as an [A]I)\b"  # how the text came to be
    r"|\b(?:this|last|next|previous|earlier) [s]ession\b"
    r"|file://+\w",
    re.IGNORECASE,
)


def foreign_words(text: str) -> list[str]:
    """Paths and words that mean something only where the text was written."""
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in _FOREIGN.finditer(line)
    ]


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
