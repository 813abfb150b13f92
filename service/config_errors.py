"""The words in which an impossible configuration is refused: which setting, which value, where it was set, what to do.

It knows pydantic's field records, but none of the settings themselves.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from service.errors import StartupError

_BOUND_WORDS = {"gt": "more than", "ge": "at least", "le": "at most"}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def allowed_values(field: FieldInfo) -> str:
    """What a setting accepts, in a few words; empty when that is any text."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(get_args(field.annotation))
    if field.annotation is bool:
        return "true or false"
    bounds = [(word, getattr(rule, key, None)) for rule in field.metadata for key, word in _BOUND_WORDS.items()]
    return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


def refuse_unknown(name: str, known: Iterable[str], subject: str, *, prefix: str = "") -> None:
    """Stops the start when `name` is not in `known`, naming the nearest one that is; all are shown with `prefix`."""
    known = list(known)
    if name in known:
        return
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    fix = f"did you mean {prefix}{nearest[0]}?" if nearest else "`adaptree config show` lists the settings there are"
    raise StartupError(f"{subject} {prefix}{name}, which is no setting; {fix}")


def explain(
    error: ValidationError, fields: Mapping[str, FieldInfo], values: Mapping[str, object], origin: Mapping[str, str]
) -> str:
    """One line for each impossible value."""
    return "\n".join(_explain_one(problem, fields, values, origin) for problem in error.errors())


def _explain_one(
    problem: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    values: Mapping[str, object],
    origin: Mapping[str, str],
) -> str:
    name = str(problem["loc"][0])
    if name not in fields:
        return f"{name} is no setting; `adaptree config show` lists the settings there are"
    shown = "(secret)" if "Secret" in str(fields[name].annotation) else repr(values.get(name))
    reason = str(problem["msg"]).removeprefix("Value error, ")
    accepts = allowed_values(fields[name])
    fix = _where_to_change(name, origin[name]) + (f"; it takes {accepts}" if accepts else "")
    return f"{name} = {shown}, from {origin[name]}, is impossible: {reason[0].lower()}{reason[1:]}. Fix: {fix}."


def _where_to_change(name: str, origin: str) -> str:
    kind, _, place = origin.partition(" ")
    return f"change `{name}` in {place}" if kind == "file" else f"change or drop {place}"
