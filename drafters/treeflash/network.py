"""The path head as it serves."""

import torch
from torch import Tensor

from drafters.specblock.hand import Hand


class ServedPathHead:
    """As `PathHead`, in two products."""

    def __init__(self, hand: Hand, epsilon: float) -> None:
        weights = hand.weights
        self._ops, self._epsilon = hand.table, epsilon
        self._token_norm = hand.vector("path_head.token_norm.weight")
        gate_up = torch.cat([weights["path_head.gate_proj.weight"], weights["path_head.up_proj.weight"]])
        self._gate_up = hand.product(gate_up)
        self._down = hand.product(weights["path_head.down_proj.weight"])

    def __call__(self, states: Tensor, embedded: Tensor) -> Tensor:
        """# both [rows, hidden] -> same"""
        token = self._ops.add_rms_norm(embedded.to(states.dtype).contiguous(), None, self._token_norm, self._epsilon)
        return states + self._down(self._ops.silu_mul(self._gate_up(torch.cat([states, token], dim=-1))))
