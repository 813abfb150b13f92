"""Which forwards a kind of drafter grows its blocks by."""

from typing import Any, Protocol, TypeVar

from torch import Tensor

from drafters.dflash.serving import InjectedForward
from drafters.specblock.model import Embed
from drafters.specblock.network import ServingNetwork
from drafters.specblock.pool import EntryPool, EntryState, Waiting
from drafters.specblock.serving import BlockForward, Nodes
from drafters.treeflash.serving import ConditionedForward
from kernels.lattice import Picked

Live = Nodes | Tensor
"""What further blocks of a tree need of those before, beside states."""

Own = TypeVar("Own", bound=Live)


class Forward(Protocol[Own]):
    """Makes blocks of what was committed, and further ones behind their nodes. Legend as in serving.py."""

    def ingest(self, rows: Tensor, waiting: Waiting) -> None:
        """Make waiting entries visible to later blocks."""

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Own]:
        """The same, and the block at the newest of them. # rows [batch] -> states [batch, 1, block, hidden]"""

    def next(self, states: Tensor, picked: Picked, live: Own, roots: Tensor) -> tuple[Tensor, Own]:
        """A block at each picked node of the last forward. # states [batch, starts before, block, hidden] of that;
        roots [batch], the root's absolute position -> [batch, starts, block, hidden]"""


def forward_of(network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> Forward[Any]:
    """Those of the network's kind."""
    config = network.config
    layers = (BlockForward if config.runs_context else InjectedForward)(network, embed, pool, state)
    return ConditionedForward(layers, network, embed) if config.traits.conditioned else layers
