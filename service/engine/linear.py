"""Linear layers with weights reordered once for the CPU's matrix units.

oneDNN otherwise reorders a bf16 weight at every call, which costs more than the product itself when there are few rows.
The products are the same bits.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """`nn.Linear` in bf16 on CPU whose weight is stored in oneDNN's blocked layout."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] bf16 -> [..., out_features] bf16"""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether packed products exist and pay here: bf16 on a CPU with native bf16 arithmetic."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` below `model` by its packed form, freeing the originals; returns how many.

    An output head tied to the embedding gets a packed copy; the embedding keeps its own storage.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
