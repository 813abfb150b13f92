"""What `make check` measures of the source: lines of code, docstrings, shapes, size of functions and classes."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef

_SHAPE = re.compile(r"\[[a-z0-9_.*+ ()/-]+(?:, *[A-Za-z0-9_.*+ ()/-]+)*\]", re.IGNORECASE)
_WITHOUT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_RECORDS = ("BaseModel", "BaseSettings", "NamedTuple", "TypedDict", "Structure")


class Method(NamedTuple):
    """A function and where it stands."""

    path: Path
    owner: ast.ClassDef | None
    node: Function

    @property
    def name(self) -> str:
        """As it is called from outside its module."""
        return (
            f"{self.path.stem}.{self.owner.name}.{self.node.name}"
            if self.owner
            else f"{self.path.stem}.{self.node.name}"
        )


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank line, comment or docstring."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Module, ast.ClassDef, Function)) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def functions(path: Path) -> Iterator[Method]:
    """Functions of a module and methods of its classes, without those that are defined inside another function."""
    for node in parsed(path).body:
        if isinstance(node, Function):
            yield Method(path, None, node)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Function):
                    yield Method(path, node, inner)


def is_public(method: Method) -> bool:
    """Whether other modules may call it."""
    owner = method.owner.name if method.owner else ""
    return not method.node.name.startswith("_") and not owner.startswith("_")


def undocumented(paths: Iterable[Path]) -> list[str]:
    """Public functions without a docstring. A method is documented where a base class documents it."""
    listed = list(paths)
    documented = _documented_by_class(listed)
    return [
        method.name
        for path in listed
        for method in functions(path)
        if is_public(method)
        and ast.get_docstring(method.node) is None
        and not any(method.node.name in documented[base] for base in _bases(method.owner))
    ]


def without_shapes(paths: Iterable[Path]) -> list[str]:
    """Public functions that take or return tensors and name no shape in their docstring or signature."""
    return [method.name for path in paths for method in tensor_functions(path) if not _names_shape(method)]


def tensor_functions(path: Path) -> Iterator[Method]:
    """Public functions whose signature names `Tensor`."""
    return (method for method in functions(path) if is_public(method) and _takes_tensors(method.node))


def too_long(paths: Iterable[Path], limit: int) -> list[str]:
    """Functions of more lines than the limit, decorators and docstring included."""
    return [m.name for path in paths for m in functions(path) if _num_lines(m.node) > limit]


def too_many_parameters(paths: Iterable[Path], limit: int) -> list[str]:
    """Functions with more parameters than the limit, without `self` and `cls`. Options of a command line are not
    counted: the parser calls them."""
    return [m.name for path in paths for m in functions(path) if _num_parameters(m.node) > limit]


def too_many_attributes(paths: Iterable[Path], limit: int) -> list[str]:
    """Classes that set more attributes on `self` than the limit; declarative records are exempt."""
    found = []
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not _is_record(node) and len(_attributes(node)) > limit:
                found.append(f"{path.stem}.{node.name}")
    return found


def repeated_class_names(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Class names that stand in two or more modules, and in which."""
    homes = defaultdict[str, list[str]](list)
    for path in paths:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.stem)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def _documented_by_class(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Names of the methods that each class documents."""
    documented = defaultdict[str, set[str]](set)
    for path in paths:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                inner = (each for each in node.body if isinstance(each, Function) and ast.get_docstring(each))
                documented[node.name].update(each.name for each in inner)
    return documented


def _bases(owner: ast.ClassDef | None) -> list[str]:
    named = (base.value if isinstance(base, ast.Subscript) else base for base in (owner.bases if owner else ()))
    return [
        base.id if isinstance(base, ast.Name) else base.attr
        for base in named
        if isinstance(base, (ast.Name, ast.Attribute))
    ]


def _takes_tensors(node: Function) -> bool:
    annotations = [argument.annotation for argument in (*node.args.args, *node.args.kwonlyargs)] + [node.returns]
    named = (inner for annotation in annotations if annotation is not None for inner in ast.walk(annotation))
    return any(isinstance(inner, ast.Name) and inner.id == "Tensor" for inner in named)


def _names_shape(method: Method) -> bool:
    """Whether a shape as `[batch, nodes]` stands in the docstring, or in a comment of the signature."""
    node = method.node
    docstring = ast.get_docstring(node) or ""
    header = method.path.read_text().splitlines()[node.lineno - 1 : node.body[0].end_lineno]
    comments = " ".join(line.partition("#")[2] for line in header)
    return bool(_SHAPE.search(docstring) or _SHAPE.search(comments)) or "scalar" in docstring


def _num_lines(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _num_parameters(node: Function) -> int:
    given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    options = sum(1 for one in given if one.annotation is not None and "typer" in ast.unparse(one.annotation))
    return 0 if options else sum(one.arg not in ("self", "cls") for one in given)


def _is_record(node: ast.ClassDef) -> bool:
    """A pydantic model, a named tuple, or a dataclass whose only methods are properties and checks of its fields."""
    methods = (inner for inner in node.body if isinstance(inner, Function) and inner.name != "__post_init__")
    derived = all(any("property" in ast.unparse(one) for one in method.decorator_list) for method in methods)
    return any(base in _RECORDS for base in _bases(node)) or (_is_dataclass(node) and derived)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that methods set on `self`, and fields of a dataclass."""
    found = set[str]()
    for inner in ast.walk(node):
        targets = (
            inner.targets
            if isinstance(inner, ast.Assign)
            else [inner.target]
            if isinstance(inner, (ast.AnnAssign, ast.AugAssign))
            else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self":
                    found.add(each.attr)
    if _is_dataclass(node):
        found.update(
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        )
    return found
