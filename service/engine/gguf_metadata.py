"""Metadata of a GGUF file by key, and how the files of an architecture differ from Llama's.

Key names follow llama.cpp. Every key of the file's architecture must be read or be listed as irrelevant; an unknown key
is a start-up error, because ignoring it could change the model's output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from service.engine.gguf_reader import GGUFFile
from service.errors import StartupError

Values = dict[str, Any]
"""Fields of a transformers config."""
_NO_EFFECT = frozenset(
    {
        "vocab_size",  # taken from the embedding
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "expert_used_count",  # read with `expert_count`, which is expected to be 0 in models without experts
        "pooling_type",
        "quantize_imatrix",
    }
)


class Metadata:
    """Reads the metadata keys of a file's architecture, named without its prefix, and tracks which were read."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.prefix = file.path.name, f"{file.architecture}."
        own = (name for name in file.fields if name.startswith(self.prefix))
        self._unread = {name.removeprefix(self.prefix): file.fields[name] for name in own}

    def take(self, name: str, default: Any = None, *, by_layer: bool = False) -> Any:
        """Read a key, or return `default`. A list with one value per layer is reduced to this value if all are equal,
        unless `by_layer`. Raises StartupError if they differ."""
        value = self._unread.pop(name, default)
        if by_layer or not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise StartupError(f"{self._file}: {self.prefix}{name} differs between layers; adaptree cannot run that")
        return value[0]

    def drop(self, *prefixes: str) -> None:
        """Ignore all keys with these prefixes."""
        self._unread = {name: value for name, value in self._unread.items() if not name.startswith(prefixes)}

    def need(self, name: str) -> Any:
        """Read a required key. Raises StartupError if it is missing."""
        value = self.take(name)
        if value is None:
            raise StartupError(f"{self._file}: key {self.prefix}{name} is missing; convert the model again")
        return value

    def refuse(self, name: str, value: object) -> StartupError:
        """Build the error for an unsupported value of a key."""
        return StartupError(f"{self._file}: {self.prefix}{name} is {value}, which adaptree cannot run")

    def expect(self, name: str, value: object) -> None:
        """Read an optional key. Raises StartupError if it has another value than this one."""
        found = self.take(name, value)
        if found != value:
            raise self.refuse(name, found)

    def refuse_unread(self) -> None:
        """Raise StartupError if a key was not read that may change the model's output."""
        unknown = sorted(self._unread.keys() - _NO_EFFECT)
        if unknown:
            raise StartupError(
                f"{self._file}: adaptree does not support the key {self.prefix}{unknown[0]}, and ignoring it may "
                f"change the model's output ({len(unknown)} such keys in all)"
            )


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how the files of an architecture differ from Llama's."""

    model_type: str  # name of the architecture in transformers
    tensors: Mapping[str, str] | None = None
    """Layer modules by tensor name that differ from `_LAYER`, or parameters if the name ends in `.weight` or
    `.bias`."""
    more: Callable[[Values, Metadata, GGUFFile], Values] | None = None
    """Computes additional config fields from the common ones, the metadata and the file."""
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # key and config field
    rotary_part: bool = False  # rotary embeddings may cover a part of each head
    pairs_adjacent: bool = False  # whether rotary pairs are interleaved in the file
    norms_plus_one: bool = False  # whether norm weights are stored as 1 + weight

    def names(self, num_layers: int) -> dict[str, str]:
        """Map tensor names to parameter names of transformers, whether or not the model has them. Tensors of experts
        are not among them."""
        layer = {**_LAYER, **(self.tensors or {})}
        names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
        for index in range(num_layers):
            names |= {f"blk.{index}.{theirs}": f"model.layers.{index}.{ours}" for theirs, ours in layer.items()}
        whole = {theirs: ours for theirs, ours in names.items() if theirs.endswith((".weight", ".bias"))}
        modules = names.items() - whole.items()
        return whole | {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules for kind in ("weight", "bias")}


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
