"""Load settings from defaults, a file, environment variables and flags; later sources override earlier ones.

Each setting has a flat name (`adaptation.alpha`). Its source is recorded, so that an error can name it.
"""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from service.api_keys import ApiKey
from service.config import SETTINGS, LoadedConfig, ServiceConfig
from service.errors import StartupError

ENV_PREFIX = "ADAPTREE_"
CONFIG_VARIABLE = "ADAPTREE_CONFIG"

_SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
_BOUND_WORDS = {"gt": "more than", "ge": "at least", "le": "at most"}

Entry = tuple[str, object, str]  # flat name, value, where it was set


def load_config(flags: Mapping[str, object], environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Load the settings. `flags`: values of the given flags by flat setting name, and `config`, the path of the file.
    Raises StartupError with a line per invalid value."""
    variables = dict(os.environ if environ is None else environ)
    named = variables.pop(CONFIG_VARIABLE, None)
    file = flags.get("config") or named
    entries = [
        *(_of_file(Path(str(file)).expanduser()) if file else ()),
        *_of_environment(variables),
        *_of_flags({name: value for name, value in flags.items() if name != "config"}),
    ]
    values: dict[str, object] = {}
    origin = dict.fromkeys(SETTINGS, "default")
    for name, value, source in entries:
        values[name], origin[name] = value, source
    try:
        return LoadedConfig(ServiceConfig.model_validate(_nested(values)), origin)
    except ValidationError as error:
        lines = [_explained(problem, values, origin) for problem in error.errors()]
        raise StartupError("\n".join(lines)) from None


def flat_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert nested values to values by flat name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, dict)
        flat |= {f"{name}.{key}": entry for key, entry in value.items()} if inside else {f"{name}": value}
    return flat


def _nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Convert values by flat name to nested values."""
    tree: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for name in values.keys() - tree.keys():
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = values[name]
    return tree


def _of_file(path: Path) -> Iterator[Entry]:
    if not path.is_file():
        raise StartupError(f"the configuration file {path} does not exist; check --config and {CONFIG_VARIABLE}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(f"the configuration file {path} must hold `setting: value` lines")
    for section in _SECTIONS & values.keys():
        found = values[section] = {} if values[section] is None else values[section]
        if not isinstance(found, dict):
            raise StartupError(
                f"the configuration file {path} sets {section} to {found!r}; it is a section: put `setting: value` "
                "lines below it"
            )
    for name, value in flat_values(values).items():
        _check(name, f"the configuration file {path} sets")
        yield name, value, f"file {path}"


def _of_environment(environ: Mapping[str, str]) -> Iterator[Entry]:
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX):
            name = variable.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _check(name, "the environment sets", _variable)
            if value:  # empty counts as unset: compose files pass empty variables for omitted settings
                yield name, value, f"environment {variable}"


def _of_flags(flags: Mapping[str, object]) -> Iterator[Entry]:
    for name, value in flags.items():
        _check(name, f"the flag {flag_name(name)} sets")
        yield name, value, f"flag {flag_name(name)}"


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", "__")


def _check(name: str, subject: str, spelt: Callable[[str], str] = str) -> None:
    """Raise StartupError for an unknown setting, suggesting the most similar name."""
    if name not in SETTINGS:
        nearest = difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.5)
        fix = f"did you mean {spelt(nearest[0])}?" if nearest else "`adaptree config show` lists all settings"
        raise StartupError(f"{subject} {spelt(name)}, which is not a setting; {fix}")


def flag_name(field_name: str) -> str:
    """Return the command-line flag of a setting."""
    return "--" + field_name.replace("_", "-")


def allowed_values(field: FieldInfo) -> str:
    """Describe the accepted values in short; empty if any text is accepted."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(get_args(field.annotation))
    if field.annotation is bool:
        return "true or false"
    if bool in get_args(field.annotation):
        return "one of true, false, auto"
    if _holds_keys(field):
        return "keys, or in a file entries of " + ", ".join(ApiKey.model_fields)
    bounds = [(word, getattr(rule, key, None)) for rule in field.metadata for key, word in _BOUND_WORDS.items()]
    return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


def _holds_keys(field: FieldInfo) -> bool:
    return ApiKey in get_args(field.annotation)


def _explained(problem: Mapping[str, Any], values: Mapping[str, object], origin: Mapping[str, str]) -> str:
    """Build the message of an invalid value, with its setting and source. For settings of a section that contradict
    each other, the message names all that were set."""
    section, *inside = map(str, problem["loc"])
    name = next((name for name in (section, ".".join([section, *inside[:1]])) if name in SETTINGS), section)
    text = str(problem["msg"]).removeprefix("Value error, ")
    reason = text[0].lower() + text[1:]
    if name not in SETTINGS:
        ours = [other for other, source in origin.items() if other.startswith(f"{name}.") and source != "default"]
        given = ", ".join(f"{other} (from {origin[other]})" for other in ours)
        return f"{name} is invalid: {reason}. Fix: change {given}."
    if inside and name == section:  # an entry of a list
        index, *field = inside
        reason = f"{' of '.join([*field, f'entry {int(index) + 1}'])}: {reason}"
    is_secret = _holds_keys(SETTINGS[name]) or "Secret" in str(SETTINGS[name].annotation)
    shown = "(secret)" if is_secret else repr(values.get(name))
    kind, _, source = origin[name].partition(" ")
    fix = f"change `{name}` in {source}" if kind == "file" else f"change or drop {source}"
    accepts = allowed_values(SETTINGS[name])
    fix += f"; it takes {accepts}" if accepts else ""
    return f"{name} = {shown}, from {origin[name]}, is invalid: {reason}. Fix: {fix}."
