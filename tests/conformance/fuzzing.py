"""Files with one key or tensor changed, dropped, doubled, renamed or of another shape."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.conformance.gguf_writer import Contents

_GGUF_KINDS = ("change", "drop key", "double key", "rename key", "drop", "double", "rename", "shape")
_FOLDER_KINDS = ("change", "drop key", "drop", "double", "rename", "shape")
_UNKNOWN = "~"  # in place of the last letter of a name
_NUMBERS = ("epsilon", "freq_base", "scaling.factor", "original_context_length", "window", "softcapping", "scale")
"""Ends of the names of keys that may have another value."""
_FIELDS = ("eps", "epsilon", "window", "softcapping", "scalar", "multiplier", "scaling")
"""The same of fields in a folder's configuration."""
_KEPT = ("architectures", "model_type", "hidden_size", "vocab_size", "pad_token_id")
"""Without them, defaults of sizes take gigabytes, and transformers wants a row for its default padding."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to a file."""

    kind: str
    name: str  # of the key or the tensor

    @property
    def may_load(self) -> bool:
        """Whether a reader can know what was meant."""
        return self.kind in ("change", "drop key", "drop")

    def is_refused_by(self, message: str) -> bool:
        """Whether an error says where it is, of a fault that is one: another number is another model. A renamed tensor
        is missing too; without a key, or a bias, others do not fit; sizes of heads and of the vocabulary are there
        twice."""
        names = {self.name, self.name.replace("key_l", "value_l"), self.name.replace("token_embd", "output")}
        if "rename" in self.kind:
            names.add(_unknown(self.name))
        if self.kind == "drop key":
            names |= {"shape", "the files contain", "Padding_idx"}
        if self.name.endswith(".bias"):
            names.add(".bias")
        return self.kind != "change" and any(name in message for name in names)


def faulty_gguf(whole: Contents, file: Path, draw: random.Random) -> Fault:
    """Write a file with one fault."""
    keys, tensors, kind = dict(whole.keys), dict(whole.tensors), draw.choice(_GGUF_KINDS)
    own = [key for key in keys if key.startswith(str(keys["general.architecture"]))]
    numbers = [key for key in own if key.endswith(_NUMBERS) and keys[key]]
    name = draw.choice(numbers if kind == "change" else own if "key" in kind else [*tensors])
    if kind == "change":
        keys[name] = _other(keys[name], draw)
    elif kind == "shape":
        data, stored = tensors[name]
        tensors[name] = (data[:-1] if draw.random() < 0.5 else np.concatenate([data, data[:1]])), stored
    else:
        _apply(kind, keys if "key" in kind else tensors, name)
    Contents(keys, tensors).write(file)
    if "double" in kind:
        _rename_back(file, name)
    return Fault(kind, name)


def faulty_folder(source: Path, folder: Path, draw: random.Random) -> Fault:
    """Write a folder with one fault."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors, kind = load_file(weights), draw.choice(_FOLDER_KINDS)
    numbers = [field for field, value in config.items() if field.endswith(_FIELDS) and type(value) in (int, float)]
    fields = numbers if kind == "change" else [field for field in config if field not in _KEPT]
    name = draw.choice(fields if kind in ("change", "drop key") else [*tensors])
    if kind == "change":
        config[name] = _other(config[name], draw)
    elif kind == "shape":
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    else:
        _apply(kind, config if "key" in kind else tensors, name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, weights, metadata={"format": "pt"})
    if kind == "double":
        _rename_back(weights, name)
    return Fault(kind, name)


def _apply(kind: str, entries: dict[str, Any], name: str) -> None:
    """Drop an entry, or have it under another name, alone or too."""
    value = entries[name] if "double" in kind else entries.pop(name)
    if "drop" not in kind:
        entries[_unknown(name)] = value


def _unknown(name: str) -> str:
    return name[:-1] + _UNKNOWN


def _other(value: Any, draw: random.Random) -> Any:
    """A value of the same type, far enough to be seen."""
    factor = draw.choice((0.5, 0.75, 1.5, 2.0))
    if isinstance(value, float):
        return 0.5 if value < 1e-3 else value * factor  # an epsilon
    return max(1, int(value * factor))


def _rename_back(file: Path, name: str) -> None:
    """Give the second of two the name of the first; both have the same length."""
    data, other = file.read_bytes(), _unknown(name).encode()
    assert data.count(other) == 1
    file.write_bytes(data.replace(other, name.encode()))
