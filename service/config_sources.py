"""Reads settings from a file and from variables under flat names (`adaptation.alpha`), each with where it was set, and
explains an impossible one: which setting, which value, where it was set, what to do.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from service.errors import StartupError

SECTION_SEPARATOR = "."
_VARIABLE_SEPARATOR = "__"
_BOUND_WORDS = {"gt": "more than", "ge": "at least", "le": "at most"}

Entry = tuple[str, object, str]  # flat name, value, where it was set


def flat_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Every setting of a model by its flat name, those of its sections included."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        section = _section(field)
        fields |= {name: field} if section is None else _prefixed(name, flat_fields(section))
    return fields


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values under their flat names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _prefixed(name, flat_values(value)) if isinstance(value, dict) else {name: value}
    return flat


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Flat names as the model takes them."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(SECTION_SEPARATOR)
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[last] = value
    return tree


def file_entries(path: Path, known: Iterable[str], removed: Mapping[str, str], *, hint: str) -> list[Entry]:
    """What a YAML file sets. Raises StartupError; `hint` says how the file was named."""
    if not path.is_file():
        raise StartupError(f"the configuration file {path} does not exist; check {hint}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"the configuration file {path} must hold `setting: value` lines")
    return [(name, value, f"file {path}") for name, value in _read(values, "", list(known), removed, path)]


def environment_entries(
    environ: Mapping[str, str], known: Iterable[str], removed: Mapping[str, str], *, prefix: str
) -> list[Entry]:
    """What variables with this prefix set, as text. Raises StartupError for one that is no setting."""
    settings = {_variable(name): name for name in known}
    gone = {_variable(name): now for name, now in removed.items()}
    entries: list[Entry] = []
    for variable, value in environ.items():
        if variable.startswith(prefix):
            name = variable.removeprefix(prefix)
            refuse_removed(name, gone, "the environment sets", prefix=prefix)
            refuse_unknown(name, settings, "the environment sets", prefix=prefix)
            # An empty variable counts as unset: compose files pass those for settings that were left out.
            entries += [(settings[name], value, f"environment {variable}")] if value else []
    return entries


def _variable(name: str) -> str:
    return name.upper().replace(SECTION_SEPARATOR, _VARIABLE_SEPARATOR)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _prefixed(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}{SECTION_SEPARATOR}{name}": value for name, value in values.items()}


def _read(
    values: Mapping[str, Any], prefix: str, known: list[str], removed: Mapping[str, str], path: Path
) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not any(other.startswith(name + SECTION_SEPARATOR) for other in known):
            refuse_removed(name, removed, f"the configuration file {path} sets")
            refuse_unknown(name, known, f"the configuration file {path} sets")
            entries.append((name, value))
        elif isinstance(value, dict | None):
            entries += _read(value or {}, f"{name}{SECTION_SEPARATOR}", known, removed, path)
        else:
            raise StartupError(
                f"the configuration file {path} sets {name} to {value!r}; it is a section: put `setting: value` lines "
                "below it"
            )
    return entries


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


def refuse_removed(name: str, removed: Mapping[str, str], subject: str, *, prefix: str = "") -> None:
    """Stops the start when `name` was a setting once, saying what has taken its place."""
    if name in removed:
        raise StartupError(f"{subject} {prefix}{name}, which is now {removed[name]}")


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
    text = str(problem["msg"]).removeprefix("Value error, ")
    reason = text[0].lower() + text[1:]
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


def _set_below(section: str, origin: Mapping[str, str]) -> str:
    """Every setting of a section that somebody has set, and where."""
    ours = [(name, source) for name, source in origin.items() if name.startswith(f"{section}.") and source != "default"]
    return ", ".join(f"{name} (from {source})" for name, source in ours)


def _where_to_change(name: str, origin: str) -> str:
    kind, _, place = origin.partition(" ")
    return f"change `{name}` in {place}" if kind == "file" else f"change or drop {place}"
