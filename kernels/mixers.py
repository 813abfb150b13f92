"""What mixes the rows of a text in a decoder layer, with its projections: attention, or a recurrence.

Legend: rows = tokens of one forward, hidden = the model's width, dim = head_dim.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from kernels.feed_forward import opened
from kernels.layers import Heads, Product
from kernels.ops import Ops
from kernels.recurrence import Convolution, LayerStates, Recurrence
from kernels.tree_attention import AttentionForm

if TYPE_CHECKING:  # an import at run time would be circular
    from kernels.decoder_layer import RowPlaces


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """The attention of a layer, with its projections."""

    ops: Ops
    rope: str | None  # name of its rotary embedding; None: no rotation
    form: AttentionForm
    heads: Heads
    query_key_value: Product
    output: Product
    gated: bool  # the projection has a gate of each output too, behind the values
    own: slice  # columns of the outputs that are projected

    def __call__(self, x: Tensor, places: "RowPlaces", pool: Tensor) -> Tensor:
        """Attend, and project the result. # x [rows, hidden]; pool [2, slots, kv_heads, dim] -> like x"""
        joined, gate = self._projected(x, pool)
        return self.attended(self._stored(joined, places, pool), places, pool, gate)

    def keep(self, x: Tensor, places: "RowPlaces", pool: Tensor) -> Tensor:
        """Project normed hidden states, and store their keys and values in the pool.
        # x [rows, hidden] -> queries [rows, query heads, dim]"""
        return self._stored(self._projected(x, pool)[0], places, pool)

    def attended(self, query: Tensor, places: "RowPlaces", pool: Tensor, gate: Tensor | None = None) -> Tensor:
        """Attend, and project the result. # query [rows, query heads, dim], gate [rows, query heads * dim] -> [rows,
        hidden]"""
        found = places.of(self.form.window).attention.attend(query, pool, self.form).flatten(1)[:, self.own]
        return self.output(found if gate is None else opened(found, gate, self.ops))

    def _projected(self, x: Tensor, pool: Tensor) -> tuple[Tensor, Tensor | None]:
        joined = self.query_key_value(x)
        if not self.gated:
            return joined, None
        width = (self.heads.query_heads + 2 * pool.shape[2]) * pool.shape[3]
        return joined[:, :width].contiguous(), joined[:, width:]

    def _stored(self, joined: Tensor, places: "RowPlaces", pool: Tensor) -> Tensor:
        rotary = None if self.rope is None else places.rotary[self.rope]
        return self.ops.rotary_store(joined, rotary, places.of(self.form.window).slots, pool, self.heads)


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A layer's recurrence in place of attention, with its projections."""

    ops: Ops
    projection: Product
    first: int  # column of the projection from which the state reads
    convolution: Convolution
    recurrence: Recurrence | None
    norm: Tensor | None  # [group] for the delta rule, else [width]; of a recurrence's output
    group: int  # columns that are normed together
    epsilon: float
    output: Product

    def __call__(self, x: Tensor, places: "RowPlaces", pool: LayerStates) -> Tensor:
        """Advance the states of all sequences by their rows, and project the result. # x [rows, hidden] -> like x"""
        assert places.states is not None, "the forward has states"
        joined, how = self.projection(x), (self.convolution, self.recurrence, pool, places.states)
        if self.recurrence is None or self.norm is None:
            before, after, value = joined.chunk(3, dim=-1)
            return self.output(after * self.ops.advance_states(before * value, *how))
        y = self.ops.advance_states(joined[:, self.first :], *how)
        gate = joined[:, : self.first] if self.first else joined[:, -y.shape[1] :]
        first, groups = not self.recurrence.corrects, y.shape[1] // self.group
        return self.output(self.ops.gated_rms_norm(y, gate, self.norm, self.epsilon, gate_first=first, groups=groups))
