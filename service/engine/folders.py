"""Whether the weights of a safetensors folder are those of its model, each once."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from service.errors import StartupError

_OF_A_DRAFTER = "model.mtp_layers."
"""Begins the names of weights that `drafters/published` reads from the same files."""
_INDEX = "model.safetensors.index.json"


def refuse_doubled(folder: Path) -> None:
    """Raise StartupError where the files of a local folder hold a tensor twice: readers take the last one silently."""
    index, names = folder / _INDEX, {"model.safetensors"}
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise StartupError(f"{index}: it does not say which file holds which weight: {error!r}") from error
    found: dict[str, str] = {}
    for file in sorted(folder / name for name in names):
        for key in _keys(file) if file.is_file() else ():
            if key in found:
                raise StartupError(f"{file}: tensor {key!r} comes twice, the first time in {found[key]}")
            found[key] = file.name


def _keys(file: Path) -> list[str]:
    """The names in a file's header, doubled ones twice: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, file.stat().st_size))
    try:
        pairs: list[tuple[str, Any]] = json.loads(header, object_pairs_hook=list)
        return [name for name, _ in pairs if name != "__metadata__"]
    except (ValueError, TypeError) as error:
        raise StartupError(f"{file}: its weights are damaged, copy or download them again: {error}") from error


def refuse_incomplete(report: Mapping[str, Collection[Any]], config: PreTrainedConfig) -> None:
    """Raise StartupError for weights that the files lack, hold in another shape, or hold beside the model's, which
    transformers would draw at random or pass over. `report`: its own, of the loading."""
    missing, others = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    for key, theirs, ours in report["mismatched_keys"]:
        raise StartupError(f"tensor {key!r} has the shape {list(theirs)}, by config.json {list(ours)}")
    if missing:
        tied = "; if it is the embedding's, set tie_word_embeddings to true in config.json"
        raise StartupError(
            f"the files hold no weights for {', '.join(missing[:3])} ({len(missing)} in all)"
            + (tied if missing == ["lm_head.weight"] else "")
        )
    unread = [key for key in others if not key.startswith(_OF_A_DRAFTER)]
    if unread:
        raise StartupError(
            f"the files hold {', '.join(unread[:3])} ({len(unread)} in all), which a model of type "
            f"{config.model_type!r} with this config.json does not have: it would compute without them"
        )
