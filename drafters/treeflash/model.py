"""What tells a state the token before its position: s + W_down (silu(g) * u), [g; u] = W [s; norm(e)]."""

import torch
from torch import Tensor, nn
from torch.nn.functional import silu


class PathHead(nn.Module):
    """Behind the layers, before the heads; it begins by passing states through."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(hidden, eps=epsilon)
        self.gate_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(2 * hidden, 2 * hidden, bias=False)
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """# both [..., hidden] -> same"""
        known = torch.cat([states, self.token_norm(embedded.to(states.dtype))], dim=-1)
        added: Tensor = self.down_proj(silu(self.gate_proj(known)) * self.up_proj(known))
        return states + added.to(states.dtype)
