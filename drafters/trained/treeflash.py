"""TreeFlash (arXiv 2606.03819): the layers run once per tree, on injected context, and give a state for each depth. An
MLP then conditions the state of a depth on the parent's token, so that children of different parents differ.

The tree grows depth by depth while that pays: the likeliest nodes of a depth get children by one run of MLP and head,
without attention.
Legend: batch, starts, hidden, forward size = depths of a tree."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.config import DrafterConfig, Fields, NetworkTraits
from drafters.network.form import TrainedKind
from drafters.network.layers import Embed
from drafters.network.pool import EntryPool, EntryState, Waiting
from drafters.network.served import ServingNetwork
from drafters.network.serving import InjectedForward
from drafters.network.structure import PathHeadOp, Structure, WeightPlanner
from drafters.trained.specblock import FusedStructure
from drafters.training.corpus import Batch
from drafters.training.forward import InjectedTraining, TrainedBlocks, after
from kernels.lattice import Picked
from kernels.layers import GateForm


@dataclass(frozen=True, slots=True)
class TreeFlashConfig(DrafterConfig):
    """Config of a TreeFlash drafter: blocks of one position, as many as one forward has states."""

    kind: ClassVar[str] = "treeflash"
    trained_blocks: ClassVar[int] = 8
    fixed: ClassVar[Fields] = {"shift": False, "broadcast": False}

    def structure(self) -> Structure:
        return ConditionedStructure(self)

    @property
    def traits(self) -> NetworkTraits:
        return NetworkTraits(len(self.tap_layers), injected=True, one_forward=True)


class PathHead(nn.Module):
    """The MLP that conditions a state s on a token embedding e: s + W_down (silu(g) * u), [g; u] = W [s; norm(e)].
    Initially it returns s unchanged."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.gate_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Condition states on the token before their position. # states, embedded [..., hidden] -> [..., hidden]"""
        known = torch.cat([states, self.token_norm(embedded.to(states.dtype))], dim=-1)
        added: Tensor = self.down_proj(silu(self.gate_proj(known)) * self.up_proj(known))
        return states + added.to(states.dtype)


class ConditionedForward:
    """Forward while serving: runs the layers once per tree, as `InjectedForward`. A block is one position: a state of
    that run, conditioned on the token before it. Further blocks need only the states, [batch, forward size, hidden]."""

    def __init__(self, network: ServingNetwork, embed: Embed, pool: EntryPool, state: EntryState) -> None:
        self._layers = InjectedForward(network, embed, pool, state)
        self._network, self._embed = network, embed
        self.ingest = self._layers.ingest

    def first(self, rows: Tensor, waiting: Waiting) -> tuple[Tensor, Tensor]:
        """Run the layers, and condition the first state on the newest token. # rows [batch]
        -> [batch, 1, 1, hidden], [batch, forward size, hidden]"""
        states, _ = self._layers.first(rows, waiting)
        return self._conditioned(states[:, :, 0], waiting.tokens[:, -1:]), states[:, 0]

    def next(self, states: Tensor, picked: Picked, layers: Tensor, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Condition the state of the depth below each picked node on that node's token. # layers [batch, forward size,
        hidden] -> [batch, starts, 1, hidden]"""
        row = picked.origin.depth[:, :, None].expand(-1, -1, layers.shape[2])
        return self._conditioned(layers.gather(1, row), picked.tokens), layers

    def _conditioned(self, states: Tensor, tokens: Tensor) -> Tensor:
        """# states [batch, starts, hidden], tokens [batch, starts] -> [batch, starts, 1, hidden]"""
        found = self._network.conditioned(states.flatten(0, 1), self._embed(tokens.flatten()))
        return found.view(states.shape)[:, :, None]


class ConditionedTraining(InjectedTraining):
    """Training forward: runs the layers once. Each further block is the next state, conditioned on the true token."""

    def first(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, TrainedBlocks]:
        """Run the layers, and condition all states on the true tokens. # anchors [batch, anchors] -> [batch, 0,
        hidden]"""
        none, layers = super().first(batch, anchors)
        places = anchors[:, :, None] + torch.arange(self._size, device=anchors.device)
        embedded = self._embed(after(batch, places.flatten(1))).view_as(layers.states)
        assert self._model.path_head is not None
        states = self._model.path_head(layers.states, embedded)
        return none, replace(layers, states=states[:, :, :1], onward=states[:, :, :1], ahead=states[:, :, 1:])

    def next(self, batch: Batch, before: TrainedBlocks, cuts: Tensor) -> TrainedBlocks:
        """Return the next states as blocks, without running layers. # cuts [batch, anchors], all 1"""
        assert before.ahead is not None
        states, ahead = before.ahead[:, :, :1], before.ahead[:, :, 1:]
        return replace(before, anchors=before.anchors + cuts, states=states, onward=states, ahead=ahead)


class ConditionedStructure(FusedStructure):
    """Structure of the TreeFlash network: SpecBlock's input layer, where only the first entry gets condition and token,
    and an MLP after the layers."""

    serving = ConditionedForward
    training = ConditionedTraining

    def path_head(self) -> nn.Module | None:
        return PathHead(self.config.hidden_size, self.shape.epsilon)

    def served_path_head(self, planner: WeightPlanner) -> PathHeadOp | None:
        weights, gate_mul = planner.weights, planner.ops.gate_mul
        token_norm = planner.norm("path_head.token_norm.weight", self.shape.epsilon)
        joined = torch.cat([weights["path_head.gate_proj.weight"], weights["path_head.up_proj.weight"]])
        gate_up, down = planner.product(joined), planner.product(weights["path_head.down_proj.weight"])

        def conditioned(states: Tensor, embedded: Tensor) -> Tensor:
            known = torch.cat([states, token_norm(embedded.to(states.dtype))], dim=-1)
            return states + down(gate_mul(gate_up(known), GateForm("silu")))

        return conditioned


KIND = TrainedKind(TreeFlashConfig, {"block_size": 1, "num_layers": 2, **TreeFlashConfig.fixed})
