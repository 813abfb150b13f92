"""The compiled twin of `kernels.accept`."""

from torch import Tensor

from kernels.accept import Accepted
from kernels.cpu.library import address, function
from kernels.tree_attention import MAX_DEPTH


def accept(tokens: Tensor, parents: Tensor, num_nodes: Tensor, target_tokens: Tensor) -> Accepted:
    """As the reference."""
    nodes = [value.contiguous() for value in (tokens, parents, num_nodes)]
    (batch, width), targets = tokens.shape, target_tokens.contiguous()
    depth = min(width, MAX_DEPTH)
    path, num_accepted, bonus = targets.new_empty(batch, depth), targets.new_empty(batch), targets.new_empty(batch)
    call, made = function("accept", "pppnnpnppp"), (path.data_ptr(), num_accepted.data_ptr(), bonus.data_ptr())
    call(*map(address, nodes), batch, width, targets.data_ptr(), depth, *made)
    return Accepted(path, num_accepted, bonus)
