"""What each row's last tree proposed, kept until the committed text tells what became of it.
Legend: rows = sequences of the engine's table, nodes = those of a tree, batch = some rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.protocol import DraftingSizes


@dataclass(frozen=True, slots=True)
class Field:
    """A table of the log."""

    shape: tuple[int, ...]  # of a row
    fill: float  # where nothing was proposed: an int for int64, a float for float32
    forgotten: bool = False  # whether `forget` fills it


class ProposalLog:
    """Tables addressed by row; behind the rows stands one of nobody's, which pads batches. They stay where they are:
    captured computations read and write them there."""

    def __init__(self, sizes: DraftingSizes, fields: Mapping[str, Field]) -> None:
        self._tables = {
            name: torch.full((sizes.max_sequences + 1, *field.shape), field.fill, device=sizes.device)
            for name, field in fields.items()
        }
        self._fills = {name: field.fill for name, field in fields.items() if field.forgotten}

    def of(self, rows: Tensor, *names: str) -> Iterator[Tensor]:
        """What these rows proposed. # each [batch, ...]"""
        return (self._tables[name].index_select(0, rows) for name in names)

    def keep(self, rows: Tensor, **values: Tensor) -> None:
        """What these rows propose now, as far as it reaches. # each [batch, <= what a row holds, ...]"""
        for name, value in values.items():
            self._tables[name][:, : value.shape[1]].index_copy_(0, rows, value)

    def forget(self, rows: Tensor | Sequence[int]) -> None:
        """Without proposals what is committed next must not be taken for the fate of old ones."""
        for name, fill in self._fills.items():
            if isinstance(rows, Tensor):
                self._tables[name].index_fill_(0, rows, fill)
            else:
                self._tables[name][list(rows)] = fill
