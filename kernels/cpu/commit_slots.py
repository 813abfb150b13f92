"""The compiled twin of `kernels.commit_slots`."""

from torch import Tensor

from kernels.commit_slots import CommittedSlots
from kernels.cpu.library import address, function


def commit_slots(
    path: Tensor,
    num_accepted: Tensor,
    num_nodes: Tensor,
    node_slots: Tensor,
    lines: Tensor,
    extend_end: Tensor,
    slot_table: Tensor,
) -> CommittedSlots:
    """As the reference."""
    path, node_slots = path.contiguous(), node_slots.contiguous()
    (batch, depth), nodes = path.shape, node_slots.shape[1]
    counts, places = (num_accepted.contiguous(), num_nodes.contiguous()), (lines.contiguous(), extend_end.contiguous())
    path_slots, freed = path.new_empty(batch, depth), path.new_empty(batch * nodes)
    assert slot_table.is_contiguous()
    call, table = function("commit_slots", "pppnnpnpppnpp"), (slot_table.data_ptr(), slot_table.shape[1])
    given = path.data_ptr(), *map(address, counts), batch, depth, node_slots.data_ptr(), nodes, *map(address, places)
    call(*given, *table, path_slots.data_ptr(), freed.data_ptr())
    return CommittedSlots(path_slots, freed)
