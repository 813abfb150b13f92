"""The target's keys and values, one pool for all sequences, addressed by slot ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import ops
from service.errors import StartupError


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values look like in a given model."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVPool:
    """Storage of every layer's keys and values. # [layers, 2, places, kv_heads, head_dim]

    Behind the slots lies one more place, which nobody reads: rows that only fill up a shape write there.
    """

    def __init__(self, shape: KVShape, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.num_places = num_slots + 1
        self.dtype = shape.dtype
        self.kv_heads = shape.kv_heads
        self.head_dim = shape.head_dim
        size = (shape.num_layers, 2, self.num_places, shape.kv_heads, shape.head_dim)
        self.storage = torch.zeros(size, dtype=shape.dtype, device=device)
        self._users: dict[range, object] = {}
        self._layers = self.storage.unbind()
        self._store = ops.on(device).store_kv
        self._places = self.storage.flatten(1, 2).unbind()  # per layer [2 * places, kv_heads, head_dim]

    def use(self, user: object, slots: range) -> bool:
        """Note who writes to these slots from now on; whether somebody else did, so that nothing is left there."""
        if self._users.get(slots) is user:
            return False
        self._users = {
            held: who for held, who in self._users.items() if held.stop <= slots.start or slots.stop <= held.start
        } | {slots: user}
        return True

    def refuse_other_shape(self, keys: Tensor, values: Tensor) -> None:
        """Raise StartupError unless keys and values look as the configuration said. # [1, kv_heads, rows, head_dim]"""
        expected = (self.kv_heads, self.head_dim)
        found = {(tensor.shape[1], tensor.shape[-1]) for tensor in (keys, values)}
        if found != {expected}:
            raise StartupError(
                f"this model's keys and values are {sorted(found)} heads by dimensions, its configuration promises "
                f"{expected}; adaptree cannot run it"
            )

    @property
    def unread_slot(self) -> int:
        """The place behind the slots."""
        return self.num_slots

    def layer(self, index: int) -> Tensor:
        """One layer's keys and values. # [2, places, kv_heads, head_dim]"""
        return self._layers[index]

    def places(self, slots: Tensor) -> Tensor:
        """Where keys and values of these slots stand in a layer, the same for every layer. # [rows] -> [2, rows]"""
        return torch.stack([slots, slots + self.num_places])

    def write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows' keys and values. # places [2, rows]; keys, values [rows, kv_heads, head_dim]"""
        self._store(self._places[index], places, keys, values)
