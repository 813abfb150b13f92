"""AdamW whose state is a fixed set of tensors from the start, so that it can be stored, compared and undone.

torch's own allocates its state at the first step; here a resumed process knows names and shapes before it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_BETAS = (0.9, 0.98)
_EPSILON = 1e-8


class Adam:
    """torch.optim.AdamW without weight decay: the weights start from a trained drafter's."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, rate: float) -> None:
        self._parameters = dict(parameters)
        self._rate = rate
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0, fused=True
        )
        for parameter in self._parameters.values():
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def num_steps(self) -> int:
        """Since the last reset."""
        return int(max(state["step"] for state in self._optimizer.state.values()))

    def step(self, share: float = 1.0) -> None:
        """Use the gradients that are there, at this share of the rate; parameters without one stay."""
        for group in self._optimizer.param_groups:
            group["lr"] = share * self._rate
        self._optimizer.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state itself, by name."""
        return {
            f"{name}.{kind}": value
            for name, parameter in self._parameters.items()
            for kind, value in self._optimizer.state[parameter].items()
        }

    @torch.no_grad()
    def forget(self, name: str, rows: Tensor) -> None:
        """What it knows of some rows of one parameter. # rows [rows] bool"""
        state = self._optimizer.state[self._parameters[name]]
        state["exp_avg"][rows] = 0
        state["exp_avg_sq"][rows] = 0

    @torch.no_grad()
    def reset(self) -> None:
        for value in self.tensors().values():
            value.zero_()
