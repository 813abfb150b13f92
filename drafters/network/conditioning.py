"""Per-position conditioning (TreeFlash): after the layers a state is conditioned on the token before its position,
s + W_down (silu(g) * u), [g; u] = W [s; norm(e)]."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters.network.structure import PathHeadOp, Structure, WeightPlanner


class PathHead(nn.Module):
    """The conditioning MLP; at first it returns states unchanged."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.gate_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Condition states on tokens. # states, embedded [..., hidden] -> [..., hidden]"""
        known = torch.cat([states, self.token_norm(embedded.to(states.dtype))], dim=-1)
        added: Tensor = self.down_proj(silu(self.gate_proj(known)) * self.up_proj(known))
        return states + added.to(states.dtype)


class ConditionedStructure(Structure):
    """A block network with the conditioning MLP after its layers."""

    def path_head(self) -> nn.Module | None:
        return PathHead(self.config.hidden_size, self.shape.epsilon)

    def served_path_head(self, planner: WeightPlanner) -> PathHeadOp | None:
        weights, silu_mul = planner.weights, planner.ops.silu_mul
        token_norm = planner.norm("path_head.token_norm.weight", self.shape.epsilon)
        joined = torch.cat([weights["path_head.gate_proj.weight"], weights["path_head.up_proj.weight"]])
        gate_up, down = planner.product(joined), planner.product(weights["path_head.down_proj.weight"])

        def conditioned(states: Tensor, embedded: Tensor) -> Tensor:
            known = torch.cat([states, token_norm(embedded.to(states.dtype))], dim=-1)
            return states + down(silu_mul(gate_up(known)))

        return conditioned
