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
    name = _setting_of(problem["loc"], fields)
    reason = _reason(problem)
    if name not in fields:
        return f"{name} is impossible: {reason}. Fix: change {_set_below(name, origin)}."
    shown = "(secret)" if "Secret" in str(fields[name].annotation) else repr(values.get(name))
    accepts = allowed_values(fields[name])
    fix = _where_to_change(name, origin[name]) + (f"; it takes {accepts}" if accepts else "")
    return f"{name} = {shown}, from {origin[name]}, is impossible: {reason}. Fix: {fix}."


def _setting_of(location: tuple[int | str, ...], fields: Mapping[str, FieldInfo]) -> str:
    """The setting a complaint is about, or the section when its settings do not fit together."""
    names = [".".join(map(str, location[:length])) for length in range(1, len(location) + 1)]
    return next((name for name in names if name in fields), names[0])


def _reason(problem: Mapping[str, Any]) -> str:
    text = str(problem["msg"]).removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _set_below(section: str, origin: Mapping[str, str]) -> str:
    """Every setting of a section that somebody has set, and where."""
    ours = [(name, source) for name, source in origin.items() if name.startswith(f"{section}.") and source != "default"]
    return ", ".join(f"{name} (from {source})" for name, source in ours)


def _where_to_change(name: str, origin: str) -> str:
    kind, _, place = origin.partition(" ")
    return f"change `{name}` in {place}" if kind == "file" else f"change or drop {place}"
