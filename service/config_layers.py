"""Settings under flat names, whatever they are nested in: `adaptation.alpha` in files, variables and flags alike.

Reads the file and a given environment into entries, each with the words that say where it was set. Knows none of the
settings themselves, and reads no environment of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, YamlConfigSettingsSource

from service.config_errors import refuse_unknown
from service.errors import StartupError

SECTION_SEPARATOR = "."
_VARIABLE_SEPARATOR = "__"

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


def file_entries(path: Path, model: type[BaseSettings], *, hint: str) -> list[Entry]:
    """What a YAML file sets. Raises StartupError; `hint` says how the file was named."""
    if not path.is_file():
        raise StartupError(f"the configuration file {path} does not exist; check {hint}")
    try:
        values = YamlConfigSettingsSource(model, yaml_file=path)()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is not valid YAML: {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise StartupError(f"the configuration file {path} must hold `setting: value` lines") from error
    return [(name, value, f"file {path}") for name, value in _read(values, "", list(flat_fields(model)), path)]


def environment_entries(environ: Mapping[str, str], model: type[BaseSettings], *, prefix: str) -> list[Entry]:
    """What variables with this prefix set. Raises StartupError for one that is no setting."""
    known = [_variable(name) for name in flat_fields(model)]
    ours = {name: value for name, value in environ.items() if name.startswith(prefix)}
    for name in ours:
        refuse_unknown(name.removeprefix(prefix), known, "the environment sets", prefix=prefix)
    source = EnvSettingsSource(model, env_nested_delimiter=_VARIABLE_SEPARATOR)
    # An empty variable counts as unset: compose files pass those for settings that were left out.
    source.env_vars = {name.lower(): value for name, value in ours.items() if value}
    return [(name, value, f"environment {prefix}{_variable(name)}") for name, value in flat_values(source()).items()]


def _variable(name: str) -> str:
    return name.upper().replace(SECTION_SEPARATOR, _VARIABLE_SEPARATOR)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _prefixed(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}{SECTION_SEPARATOR}{name}": value for name, value in values.items()}


def _read(values: Mapping[str, Any], prefix: str, known: list[str], path: Path) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if not _is_section(name, known):
            refuse_unknown(name, known, f"the configuration file {path} sets")
            entries.append((name, value))
        elif isinstance(value, dict | None):
            entries += _read(value or {}, f"{name}{SECTION_SEPARATOR}", known, path)
        else:
            raise StartupError(
                f"the configuration file {path} sets {name} to {value!r}; it is a section: put `setting: value` lines "
                "below it"
            )
    return entries


def _is_section(name: str, known: list[str]) -> bool:
    return any(other.startswith(name + SECTION_SEPARATOR) for other in known)
